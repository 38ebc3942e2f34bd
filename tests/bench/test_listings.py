"""The worked examples print what the documents print, where those are right; and docs/metrics.md holds them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from quire.bench.goodput import PRESETS
from quire.bench.listings import LISTINGS, Listing
from quire.bench.request_metrics import DEFINITIONS
from quire.cli.main import main

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"

# What the pages print, word for word; five figures of theirs are wrong and stand here as they should be.
PRINTED = {
    "measure-prefill-and-decode": "TTFT: 320 ms\ndecode ITLs: [35, 37, 36] ms\ndecode TPS: 27.8\n",
    "route-latency-investigation": "long initial pause: inspect queueing and prefill\n"
    "choppy stream: inspect decode scheduling and memory pressure\n",
    "estimate-sharded-bandwidth-bound": "fits on one H100-80GB: False\n"
    "four-GPU ideal shard-read bound: 95.7 tokens/s\n",
    "calculate-kv-cache-footprint": "GQA cache: 1.34 GB\nMHA cache: 10.74 GB\nMHA / GQA: 8\n",
    "check-capacity-with-runtime-headroom": "raw weights plus KV: 67.69 GB\n"
    "with 8 GB runtime reserve: True\nwith 16 GB runtime reserve: False\n",
    "dynamic-token-budgeting": "max context per user: 8,544 tokens\n",
    "admit-request-by-token-budget": "admit 16K request: True\nadmit 64K request: False\n",
    "interleave-prefill-with-active-decode": "prefill 2048\ndecode active streams\n" * 3,
    "compare-disaggregation-overhead": "bursty workload: separate prefill and decode pools\n"
    "small prompts: keep phases colocated\n",
    "estimate-kv-quantization-gain": "FP16 users from KV budget: 59\nFP8 users from KV budget: 119\n"
    "runtime headroom still required: True\n",
    "estimate-throughput": "Model memory: 140.0 GB\nTime per token (batch=1): 70.0 ms\n"
    "Tokens/sec (batch=1): 14.3\nWords/sec (approx): 11.0\n",
    "metrics-of-one-request": "{'ttft_ms': 200, 'e2el_ms': 2200.0, 'tpot_ms': 40.82, 'tokens_per_sec': 24.5, "
    "'mean_itl_ms': 40.82, 'p50_itl_ms': 40.82, 'p99_itl_ms': 40.82}\n",
    "tpot-by-hand": "TPOT = 2000 / 49 = 40.8 ms/token, 24.5 tokens/sec\n",
    "end-to-end-latency": "E2EL = 8.26 s\n",
    "mean-itl-over-requests": "mean TPOT: 40 ms\nmean ITL: 49.82 ms\n",
    "goodput-of-100-requests": "{'total_rps': 100, 'goodput_rps': 90, 'goodput_rate': 0.9, 'slo_violations': 10}\n",
    "goodput-and-throughput": "1000 requests/s with 40% violations: goodput 600 requests/s\n"
    "700 requests/s with 0% violations: goodput 700 requests/s\n",
    "kv-cache-sizes": "8B, 4K: 0.50 GiB\n70B, 4K: 1.25 GiB\n70B, 128K: 40.00 GiB\n",
}


@pytest.mark.parametrize("listing", LISTINGS, ids=lambda one: one.name)
def test_an_example_prints_the_right_figures(listing: Listing) -> None:
    assert listing.output() == PRINTED[listing.name]
    assert listing.about


def test_every_example_is_checked() -> None:
    assert [one.name for one in LISTINGS] == list(PRINTED)


def test_the_page_shows_the_output_of_its_code() -> None:
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", DOCS.read_text(), re.DOTALL)
    assert len(blocks) == len(LISTINGS) + 1  # the first are the imports
    names: dict[str, object] = {}
    for code, printed in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        assert out.getvalue() == printed


def test_the_page_holds_every_example_definition_and_preset() -> None:
    text = DOCS.read_text()
    for one in LISTINGS:
        assert f"### {one.name}\n" in text
        assert one.source() in text
        assert one.note in text
    for name, words in DEFINITIONS.items():
        assert f"| {name} | {words} |" in text
    for name, (slo, why) in PRESETS.items():
        assert f"| {name} | `{slo}` | {why} |" in text


def test_explained_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "explain-metrics"]) == 0
    text = capsys.readouterr().out
    assert all(words in text for words in DEFINITIONS.values())
    assert "decode TPS: 27.8" in text
    assert main(["bench", "explain-metrics", "tpot-by-hand"]) == 0
    assert "40.8 ms/token" in capsys.readouterr().out
    assert main(["bench", "explain-metrics", "tpott"]) == 2
    assert "did you mean tpot" in capsys.readouterr().err
