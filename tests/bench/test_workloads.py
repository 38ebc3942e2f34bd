"""Arrivals, workloads and traces: tiny files of the published formats, made by hand."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path

import pytest

from quire.bench.arrivals import arrivals, at_rate, variation
from quire.bench.simulated_arrivals import arrivals_of_trace
from quire.bench.traces import TraceError, TraceRow, read_trace
from quire.bench.workloads import Lengths, Piece, Scaling, Shape, Speller, from_file, from_trace, synthetic


def shape(**options: object) -> Shape:
    known = {"requests": 6, "input_len": Lengths("32"), "output_len": Lengths("8")}
    return Shape(**{**known, **options})  # type: ignore[arg-type]


# ---- arrivals


def test_constant_arrivals() -> None:
    assert arrivals("constant", 4.0, 4) == [0, 0.25, 0.5, 0.75]
    assert arrivals("poisson", float("inf"), 3) == [0, 0, 0]
    assert arrivals("poisson", 5.0, 1) == [0.0]
    assert arrivals("constant", 5.0, 0) == []


@pytest.mark.parametrize(("burstiness", "cv"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_gamma_gaps_have_the_variation_asked_for(burstiness: float, cv: float) -> None:
    times = arrivals("gamma", 10.0, 8000, seed=3, burstiness=burstiness)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(7999 / 10)  # the rate asked for, exactly
    assert variation(times) == pytest.approx(cv, rel=0.06)


def test_arrivals_repeat_with_their_seed() -> None:
    assert arrivals("poisson", 3, 50, seed=1) == arrivals("poisson", 3, 50, seed=1)
    assert arrivals("poisson", 3, 50, seed=1) != arrivals("poisson", 3, 50, seed=2)
    # Poisson: as many gaps below the mean as the exponential distribution has, 1 - 1/e
    times = arrivals("poisson", 1, 5000, seed=9)
    short = sum(b - a < 1 for a, b in itertools.pairwise(times)) / 4999
    assert short == pytest.approx(0.632, abs=0.02)


def test_a_trace_keeps_its_pattern_at_another_rate() -> None:
    assert at_rate([0, 1, 1, 10], 3.0) == pytest.approx([0, 0.1, 0.1, 1.0])
    assert at_rate([5, 5], 2) == [0, 0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate": 0}, "rate"),
        ({"burstiness": 0}, "burstiness"),
        ({"process": "weekly"}, "not one of"),
        ({"count": -1}, "count"),
    ],
)
def test_arrivals_refuse(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        arrivals(**{"process": "gamma", "rate": 1.0, "count": 3, **options})  # type: ignore[arg-type]


# ---- synthetic workloads


def test_lengths() -> None:
    rng = random.Random(0)
    assert Lengths("512").draw(rng) == 512
    assert all(256 <= Lengths("256-300").draw(rng) <= 300 for _ in range(50))
    normal = [Lengths("normal:500:50").draw(rng) for _ in range(2000)]
    assert (statistics.mean(normal), statistics.stdev(normal)) == pytest.approx((500, 50), rel=0.08)
    assert statistics.median(Lengths("lognormal:300:0.5").draw(rng) for _ in range(2000)) == pytest.approx(
        300, rel=0.08
    )
    for bad in ("", "0", "x", "9-3", "normal:5", "weird:1:2", "lognormal:nan:1", "1e99"):
        with pytest.raises(ValueError, match="input-len"):
            Lengths(bad, "input-len")


def test_families_share_their_prefix_and_nothing_else() -> None:
    work = synthetic(shape(prefix_len=100, families=2))
    speller = Speller()
    texts = [speller.text(session.turns[0].pieces).split() for session in work.sessions]
    assert all(len(words) == 132 for words in texts)
    assert texts[0][:100] == texts[2][:100] == texts[4][:100]
    assert texts[1][:100] == texts[3][:100] != texts[0][:100]
    assert len({tuple(words[100:]) for words in texts}) == 6
    other = synthetic(shape(prefix_len=100, families=2, salt="again"))
    assert other.digest() != work.digest() == synthetic(shape(prefix_len=100, families=2)).digest()
    assert speller.text(other.sessions[0].turns[0].pieces).split()[:20] != texts[0][:20]


def test_conversations_have_their_turns() -> None:
    work = synthetic(shape(requests=7, turns=3, think=2.0, prefix_len=10))
    assert [len(session.turns) for session in work.sessions] == [3, 3, 1]
    assert work.num_requests == 7
    first, second, _ = work.sessions[0].turns
    assert (len(first.pieces), len(second.pieces)) == (2, 1)  # the system prompt is said once
    assert first.think == 0 < second.think


def test_the_speller_learns_how_the_server_counts() -> None:
    speller = Speller()
    speller.calibrate((32, 50), (160, 210))  # 1.25 tokens a word and 10 around
    assert speller.words_per_token == pytest.approx(0.8)
    assert speller.overhead == pytest.approx(10)
    pieces = (Piece("a", 100), Piece("b", 60))
    words = speller.text(pieces).split()
    assert len(words) == 80 + 40  # shared pieces keep their length; the last makes room
    assert len(words) * 1.25 + 10 == pytest.approx(160)
    assert speller.words("a", 30) == " ".join(words[:30])
    ids = Speller(ids=range(7, 9)).token_ids(pieces)
    assert len(ids) == 160
    assert set(ids) == {7, 8}


# ---- traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.4799600,110,27
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 2000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 7]},
    {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [9, 10]},
]


def mooncake(path: Path) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in MOONCAKE))
    return path


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    rows = read_trace(path)
    assert [row.at for row in rows] == pytest.approx([0.0, 0.052, 1.5])
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(4808, 10), (3180, 8), (110, 27)]
    assert len(read_trace(path, limit=2)) == 2
    work = from_trace(rows, Scaling(length=0.1, max_input=400), "azure.csv")
    turns = [session.turns[0] for session in work.sessions]
    assert [turn.input_tokens for turn in turns] == [400, 318, 11]
    assert [turn.output_tokens for turn in turns] == [1, 1, 3]
    assert "1 cut" in work.text
    assert work.times() == pytest.approx([0.0, 0.052, 1.5])


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.1])
def test_prompts_share_the_blocks_with_equal_hashes(tmp_path: Path, scale: float) -> None:
    rows = read_trace(mooncake(tmp_path / "m.jsonl"))
    work = from_trace(rows, Scaling(length=scale), "m")
    speller = Speller()
    prompts = [speller.text(session.turns[0].pieces).split() for session in work.sessions]
    assert [len(words) for words in prompts] == [round(row.input_tokens * scale) for row in rows]
    shared = next(i for i, (a, b) in enumerate(zip(prompts[0], prompts[1], strict=False)) if a != b)
    assert shared == pytest.approx(1024 * scale, abs=2)  # two blocks of 512, and then different words
    assert prompts[2][:8] != prompts[0][:8]
    ids = [Speller(ids=range(1000)).token_ids(session.turns[0].pieces) for session in work.sessions]
    same = next(i for i, (a, b) in enumerate(zip(ids[0], ids[1], strict=False)) if a != b)
    assert same == pytest.approx(1024 * scale, abs=2)


def test_a_timed_trace_of_vllm_and_one_of_alibaba(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "m.jsonl")
    assert read_trace(path, form="timed-trace:512:0.001") == read_trace(path)
    rows = read_trace(path, form="timed-trace:100")
    assert [(row.at, row.block_tokens) for row in rows] == [(0, 100), (2000, 100), (3000, 100)]
    first, second, _ = arrivals_of_trace(rows)
    assert first.prompt[:200] == second.prompt[:200]
    assert not {*first.prompt[200:]} & {*second.prompt[200:]}
    path.write_text("\n".join(json.dumps(row | {"chat_id": 1}) for row in MOONCAKE))
    assert read_trace(path) == read_trace(path, form="timed-trace")
    assert {row.block_tokens for row in read_trace(path)} == {16}
    for form in ("mooncake", "timed-trace:0", "timed-trace:16:0", "timed-trace:x", "timed-trace:16:1:1"):
        with pytest.raises(ValueError, match="trace-format: "):
            read_trace(path, form=form)
    path.write_text(AZURE)
    with pytest.raises(TraceError, match="line 1: not JSON"):
        read_trace(path, form="timed-trace")


def test_burstgpt_with_and_without_sessions(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT_1.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n"
    )
    assert read_trace(path) == [TraceRow(0.0, 472, 18), TraceRow(40.0, 1087, 0)]
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "9.5,3,1.2,GPT-4,10,20,30,API log\n"
    )
    assert read_trace(path) == [TraceRow(0.0, 10, 20)]


def test_lengths_without_times(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n12,3,15,4\n"
    )
    assert read_trace(path) == [TraceRow(None, 3772, 54), TraceRow(None, 12, 3)]
    path.write_text("arrival_time_ns,input_toks,output_toks\n500000000,7,8\n1500000000,1,2\n")
    assert read_trace(path) == [TraceRow(0.0, 7, 8), TraceRow(1.0, 1, 2)]


def servegen(folder: Path) -> Path:
    folder.mkdir()
    (folder / "chunk-0-trace.csv").write_text("0,0,0,,0,0\n600,2.0,1.0,Gamma,1.0,0.5\n1200,0,0,,0,0\n")
    (folder / "chunk-3-trace.csv").write_text("0,0,0,,0,0\n600,1.0,1.0,Weibull,1.0,1.0\n1200,0,0,,0,0\n")
    windows = {"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{3: 1.0}", "reason_ratio": "{}"}}
    for chunk in (0, 3):
        (folder / f"chunk-{chunk}-dataset.json").write_text(json.dumps(windows))
    return folder


def test_servegen_is_drawn_from_its_clients(tmp_path: Path) -> None:
    folder = servegen(tmp_path / "gen")
    rows = read_trace(folder)
    assert len(rows) == pytest.approx(600 * 3, rel=0.1)  # 2 and 1 requests a second for ten minutes
    assert rows == sorted(rows, key=lambda row: row.at or 0)
    assert {row.input_tokens for row in rows} == {10, 20}
    assert read_trace(folder, limit=50) == read_trace(folder, limit=50)
    assert len(read_trace(folder, limit=50)) == 50
    assert read_trace(folder, limit=50, seed=1) != read_trace(folder, limit=50)
    assert len(read_trace(folder, start=900.0)) < len(rows)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "line 1: unknown columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: TIMESTAMP: 'yesterday'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-4,2\n", "ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,99999999999,2\n", "not a number of tokens"),
        ("num_prefill_tokens,num_decode_tokens\n1.5,2\n", "line 2: num_prefill_tokens"),
        ('{"timestamp": 0, "input_length": 3}', "output_length: 'None' is not a number"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": "x"}', "hash_ids"),
        ('{"timestamp": NaN, "input_length": 3, "output_length": 1}', "timestamp"),
        ("{oops", "line 1: not JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
    ],
)  # fmt: skip
def test_broken_traces_are_refused_by_line_and_field(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        read_trace(path)


def test_missing_and_binary_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(tmp_path / "bin")
    with pytest.raises(TraceError, match="no chunk-N-trace"):
        read_trace(tmp_path)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "Hi", "max_tokens": 9, "timestamp": 1}\n{"messages": [{"role": "user", "content": "x"}]}\nplain\n'
    )
    work = from_file(path, output_len=Lengths("5"))
    turns = [session.turns[0] for session in work.sessions]
    assert [turn.output_tokens for turn in turns] == [9, 5, 5]
    assert (turns[0].text, turns[1].messages[0]["content"], turns[2].text) == ("Hi", "x", "plain")
    for line, says in (
        ('{"prompt": 3}', "not a string"),
        ("{}", "needs either"),
        ('{"prompt": "a", "max_tokens": 0}', "output_tokens"),
    ):
        path.write_text(line)
        with pytest.raises(TraceError, match=says):
            from_file(path)
