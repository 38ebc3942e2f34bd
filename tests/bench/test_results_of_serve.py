"""From a measured run to its file, its text, its page and its comparison; and the commands against a real server."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import xml.dom.minidom
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_llm import Behaviour, FakeLLM, serve
from quire.bench import results
from quire.bench.compare import CompareError, compare, differences
from quire.bench.html_report import page
from quire.bench.server_bench import ServeError, records_of, request_rows
from quire.bench.server_metrics import parse_exposition
from quire.bench.svg import AxisScale, histogram, number
from quire.bench.timeline import RequestRecord
from quire.cli.main import main
from quire.util.http_client import target


class Live:
    """A FakeLLM on a real port, in a thread."""

    def __init__(self, behaviour: Behaviour, owner: str = "vllm") -> None:
        self.server = FakeLLM(behaviour, owner)
        ready = threading.Event()

        async def run() -> None:
            self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
            async with await serve(self.server) as listening:
                self.port = listening.sockets[0].getsockname()[1]
                ready.set()
                await self.stop.wait()

        self.thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        self.thread.start()
        assert ready.wait(30)
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(30)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    found = Live(Behaviour(ttft=0.02, itl=0.002))
    yield found
    found.close()


def bench(*words: str) -> int:
    return main(["bench", *words])


def test_serve_on_a_real_socket(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times are real here, so only what they can't be below is checked."""
    common = [
        live.url,
        "--rate",
        "100",
        "--num-requests",
        "12",
        "--input-len",
        "20",
        "--output-len",
        "6",
        "--quiet",
    ]
    objective = ["--goodput", "ttft:60000", "e2el:60000"]
    for name, more in (("a", []), ("b", ["--api", "completions"])):
        save = str(tmp_path / f"{name}.json")
        assert (
            bench("serve", *common, *more, *objective, "--save", save, "--html", str(tmp_path / "p.html"))
            == 0
        )
    text = capsys.readouterr().out
    assert "fake-model at" in text
    assert "(vllm)" in text
    assert "goodput" in text
    assert "100.0 % of all met ttft:60000 e2el:60000" in text
    assert "scheduled send time → first chunk with text" in text
    found = results.load(tmp_path / "a.json")
    records = records_of(found.tables["requests"])
    assert [record.input_tokens for record in records] == [
        20
    ] * 12  # calibrated: the template's four are made room for
    assert all(record.output_tokens == 6 and record.times[0] - record.scheduled >= 0.02 for record in records)
    assert found.metrics["itl_p50"].value is not None
    assert [body.get("ignore_eos") for _, body in live.server.seen][-1] is True
    well_formed(page([found]))
    # the two runs are the same work by another route
    assert differences(found, results.load(tmp_path / "b.json")) == []
    assert (
        bench(
            "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--html", str(tmp_path / "c.html")
        )
        == 0
    )
    table = capsys.readouterr().out
    assert re.search(r"ttft_p50 +ms +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ to [\d.]+", table)
    assert bench("report", str(tmp_path / "a.json"), "-o", str(tmp_path / "r.html")) == 0
    well_formed((tmp_path / "r.html").read_text())


def test_secrets_are_sent_and_not_kept(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save, html, prompts = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "prompts.txt"
    prompts.write_text("measured prompt one\nmeasured prompt two\n")
    secrets = ["--api-key", "sesame", "--header=x-secret: swordfish"]
    files = ["--save", str(save), "--html", str(html), "--prompts", str(prompts), "--json", "--quiet"]
    assert bench("serve", live.url, *secrets, *files, "--output-len", "3") == 0
    for text in (save.read_text(), html.read_text(), capsys.readouterr().out):
        assert "sesame" not in text
        assert "swordfish" not in text
    sent = [json.dumps(body) for _, body in live.server.seen[-8:]]
    assert sum("measured prompt one" in body for body in sent) == 1  # the warm-up sent other texts


def test_a_trace_on_a_real_socket(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of a trace share what its hashes share, when they are due, cut to what the machine serves."""
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 900, "hash_ids": [0, 1, 2]},
        {"timestamp": 4000, "input_length": 1030, "output_length": 50, "hash_ids": [0, 1, 7]},
    ]
    trace, save = tmp_path / "trace.jsonl", tmp_path / "r.json"
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    words = ["--trace", str(trace), "--length-scale", "0.1", "--max-output-len", "4", "--rate", "20"]
    assert bench("serve", live.url, *words, "--api", "completions", "--quiet", "--save", str(save)) == 0
    assert "2 requests of trace.jsonl, lengths × 0.1, 2 cut to the bounds" in capsys.readouterr().out
    records = records_of(results.load(save).tables["requests"])
    assert [record.scheduled for record in records] == pytest.approx([0, 0.05])
    assert [record.output_tokens for record in records] == [4, 4]
    prompts = [body["prompt"].split() for _, body in live.server.seen[-2:]]
    first, second = sorted(prompts, key=len, reverse=True)  # two connections: either may be accepted first
    assert (len(first), len(second)) == (110, 103)
    assert first[:102] == second[:102]
    assert first[102:110] != second[102:]


def test_a_trace_of_lengths_alone_takes_the_rate(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, save = tmp_path / "lengths.csv", tmp_path / "r.json"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n20,3\n30,2\n")
    words = [live.url, "--trace", str(trace), "--quiet", "--save", str(save)]
    assert bench("serve", *words, "--rate", "20") == 0
    assert "open loop, poisson, 20 requests/s" in capsys.readouterr().out
    assert [record.output_tokens for record in records_of(results.load(save).tables["requests"])] == [3, 2]
    assert bench("serve", *words) == 2
    assert "rate: this trace has no times" in capsys.readouterr().err
    assert bench("serve", *words, "--rate", "20", "--arrival", "trace") == 2
    assert "arrival: this workload has no times" in capsys.readouterr().err


def test_batching_and_interference_without_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("batching", "--requests", "12", "--batch-size", "4", "--save", str(tmp_path / "b.json")) == 0
    assert "continuous over static" in capsys.readouterr().out
    policies = {row["policy"]: row for row in results.load(tmp_path / "b.json").tables["policies"]}
    assert policies["continuous"]["output_token_rate"] > policies["static"]["output_token_rate"]
    assert (
        bench("interference", "--prompt-len", "400", "--chunk", "100", "--save", str(tmp_path / "i.json"))
        == 0
    )
    found = results.load(tmp_path / "i.json").metrics
    assert found["chunked_gap_max"].value == pytest.approx(20 + 0.5 * 104)
    assert found["whole_gap_max"].value == pytest.approx(20 + 0.5 * 404)
    well_formed(page([results.load(tmp_path / "b.json"), results.load(tmp_path / "i.json")]))


def test_sweep_on_a_real_socket(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save, html = tmp_path / "s.json", tmp_path / "s.html"
    words = ["--rates", "50,100", "--min-requests", "5", "--duration", "0.1", "--output-len", "3", "--quiet"]
    slo = ["--goodput", "ttft:60000", "tpot:60000"]
    assert bench("sweep", live.url, *words, *slo, "--save", str(save), "--html", str(html)) == 0
    text = capsys.readouterr().out
    assert "← knee" in text
    assert "every measured load was served: the knee is higher" in text
    found = results.load(save)
    assert [row["rate"] for row in found.tables["loads"]] == [50, 100]
    assert found.metrics["knee_goodput"].value == 100
    page_text = html.read_text()
    assert "goodput zone" in page_text
    assert "SLO 60000 ms" in page_text
    well_formed(page_text)
    prompts = [json.dumps(body["messages"]) for _, body in live.server.seen[-10:]]
    assert len(set(prompts)) == 10  # no load repeats another's texts


def test_servers_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("serve", "http://127.0.0.1:9", "--quiet") == 1
    assert "connect: 127.0.0.1:9" in capsys.readouterr().err
    broken = Live(Behaviour(refuse=set(range(99))))
    try:
        assert bench("serve", broken.url, "--num-requests", "3", "--quiet") == 1
        assert "every warm-up request failed: HTTP 429: queue full" in capsys.readouterr().err
        assert bench("serve", broken.url, "--num-requests", "3", "--warmup", "0", "--quiet") == 1
        text = capsys.readouterr().out
        assert "100.0 % failed" in text
        assert "3 of 3 requests failed: 3 × HTTP 429" in text
    finally:
        broken.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rate", "1", "--concurrency", "2"], "concurrency: cannot be combined with --rate"),
        (["--rate", "-1"], "rate: -1.0 is not above 0"),
        (["--arrival", "constant"], "rate: --arrival constant needs a rate"),
        (["--input-len", "many"], "input-len: 'many'"),
        (["--goodput", "speed:1"], "goodput: 'speed:1'"),
        (["--header", "x"], "header: 'x' does not have the form NAME:VALUE"),
        (["--backend", "gpt"], "backend: 'gpt' is not one of auto"),
        (["--arrival", "trace"], "arrival: this workload has no times"),
        (["--burstiness", "0", "--rate", "1", "--arrival", "gamma"], "burstiness"),
    ],
)
def test_options_that_make_no_sense(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("serve", "http://127.0.0.1:9", *words) == 2
    assert says in capsys.readouterr().err


def test_addresses() -> None:
    assert target("localhost:8000/v1").url == "http://localhost:8000"
    assert target("https://host/base/").url == "https://host/base"
    assert target("http://[::1]:80").authority == "[::1]"
    for bad in ("ftp://x", "http://", "http://u:p@x", "http://x?y=1", "http://x:99999"):
        with pytest.raises(ValueError, match="url"):
            target(bad)
    with pytest.raises(ValueError, match="line break"):
        target("http://x", {"a": "b\r\nc: d"})


def example(shift: float = 0.0, **settings: Any) -> results.Result:
    from quire.bench.recording import Recording
    from quire.bench.request_metrics import summarize

    records = [
        RequestRecord(index=i, scheduled=i * 0.1, sent=i * 0.1, closed=i * 0.1 + 1, finished=i * 0.1 + 1,
                      times=[i * 0.1 + (0.3 + 0.001 * (i % 7)) * (1 + shift) + 0.05 * k for k in range(5)],
                      output_tokens=5, input_tokens=9, finish_reason="length")
        for i in range(40)
    ]  # fmt: skip
    records += [RequestRecord(index=40, scheduled=4.0, closed=4.1, error="HTTP 500", status=500)]
    summary = summarize(records)
    return Recording("serve", ["quire"]).result(
        settings={"model": "m", "workload_digest": "d", "pace": "p", "goodput": "", "requests": 41} | settings,
        metrics=summary.metrics(),
        definitions={"ttft": "<first> & only"},
        tables={"requests": request_rows(records), "latencies": [d.row() for d in summary.distributions.values()],
                "server": [{"at": 1.0, "prefill_tokens": 5, "decode_tokens": 7, "running": 2, "waiting": 0},
                           {"at": 2.0, "prefill_tokens": 0, "decode_tokens": 9, "running": 3, "waiting": 1}]},
        notes=["a < b"],
    )  # fmt: skip


def test_ratios_and_their_intervals() -> None:
    changes = {one.name: one for one in compare(example(), example(shift=0.2))}
    ttft = changes["ttft_p50"]
    assert ttft.ratio == pytest.approx(1.2)
    assert ttft.low is not None
    assert ttft.high is not None
    assert 1.19 < ttft.low <= 1.2 <= ttft.high < 1.21
    assert ttft.verdict == "worse"
    same = {one.name: one for one in compare(example(), example())}
    assert {one.verdict for one in same.values()} == {""}
    assert {one.ratio for one in same.values()} <= {None, 1.0}
    assert same["request_rate"].low is None  # one run says nothing about how sure a rate is


def test_different_work_is_not_compared() -> None:
    with pytest.raises(CompareError, match="workload_digest: 'd' and 'e'"):
        compare(example(), example(workload_digest="e"))
    assert compare(example(), example(workload_digest="e"), force=True)
    assert differences(example(), example(model="another", url="u")) == []


def test_records_survive_the_file() -> None:
    record = RequestRecord(index=3, scheduled=1.5, sent=1.500001, times=[2.0, 2.25, 2.250001], counts=[1, 2, 1],
                           finished=2.3, closed=2.4, output_tokens=4, server={"eval": 0.5})  # fmt: skip
    rows = json.loads(json.dumps(request_rows([record])))
    assert rows[0]["times"] == "2000000 250000 1"
    assert records_of(rows) == [record]
    for broken in ({"times": "x"}, {"scheduled": "soon"}, {"counts": "1"}):
        with pytest.raises(ServeError, match="row 0"):
            records_of([rows[0] | broken])


def test_the_page_is_well_formed_complete_and_fetches_nothing() -> None:
    text = page([example(), example(shift=0.5)])
    document = well_formed(text)
    titles = [node.firstChild.data for node in document.getElementsByTagName("figcaption")]  # type: ignore[union-attr]
    for title in ("Time to first token", "Inter-token latency: every gap", "End-to-end latency", "Requests over time",
                  "Contents of the server's steps"):  # fmt: skip
        assert titles.count(title) == 2
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"https?://|<script|url\(|@import", text)
    assert "a &lt; b" in text
    assert "&lt;first&gt; &amp; only" in text


def test_the_page_of_a_run_without_a_single_success() -> None:
    failed = example()
    for row in failed.tables["requests"]:
        row |= {"error": "HTTP 500", "finished": None, "times": "", "counts": ""}
    failed.metrics = {"failure_rate": results.Metric(1.0, "share"), "ttft_p50": results.Metric(None, "ms")}
    failed.tables |= {
        "latencies": [],
        "misses": [{"objective": "ttft", "requests": 7}],
        "loads": [],
        "server": [],
    }
    text = page([failed])
    well_formed(text)
    assert "<b>100</b> %<span>failure rate" in text
    assert "<td>7</td>" in text, "a whole number stays one"
    assert "Requests over time" in text


def well_formed(text: str) -> xml.dom.minidom.Document:
    return xml.dom.minidom.parseString(text[text.index("<html") :])


def test_scales() -> None:
    linear, log = AxisScale(0, 10, 100, 200), AxisScale(1, 1000, 0, 300, log=True)
    assert [linear(x) for x in (0, 5, 10, 99)] == [100, 150, 200, 200]
    assert linear.ticks() == [0, 2, 4, 6, 8, 10]
    assert [log(x) for x in (1, 10, 100, 1000)] == [0, 100, 200, 300]
    assert log.ticks() == [1, 10, 100, 1000]
    assert [number(x) for x in (0, 0.5, 12.25, 1500, 2e6, 1e-5)] == [
        "0",
        "0.5",
        "12.25",
        "1,500",
        "2e6",
        "1e-5",
    ]
    for samples in ([1.0], [5.0] * 9, [0.0, 0.0], [0.001, 900.0]):
        assert histogram("t", samples, "ms").count("<rect") >= 1


def test_expositions() -> None:
    text = '# HELP a b\na_total{x="1}"} 3\na_total{x="2"} 4 1700\nb_bucket{le="1"} 9\nb_sum 2.5\nc NaN\nbroken\nd x\n'
    assert parse_exposition(text) == {"a_total": 7.0, "b_sum": 2.5}
