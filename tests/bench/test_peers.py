"""The comparison with other engines: its arithmetic and its table, without any of them."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers import workloads
from benchmarks.peers.engines import ENGINES, PeerError, sh
from benchmarks.peers.table import compare, markdown, medians

from quire.bench.recording import Recording
from quire.bench.results import MachineLimits, metric, spread


def row(engine: str, value: float, work: str = "decode", form: str = "bf16") -> dict[str, object]:
    return {"round": 0, "engine": engine, "format": form, "its_format": form, "work": work, "value": value}


def test_ratio_is_to_the_best_of_the_others() -> None:
    found = medians(
        [row("quire", 30.0), row("quire", 10.0), row("quire", 20.0), row("a", 5.0), row("b", 8.0)]
    )
    assert compare(found, "bf16", "decode") == ("b", "2.50")
    assert compare(found, "int8", "decode") == ("-", "-")
    assert compare(medians([row("a", 5.0)]), "bf16", "decode") == ("a", "-")


def test_table() -> None:
    rows = [row("quire", 20.0), row("a", 8.0), row("a", 3.0, "c8", "int8"), row("a", 900.0, "memory")]
    result = Recording("peers", ["python", "-m", "benchmarks.peers"]).result(
        settings={"shape": "tiny", "rounds": 1},
        limits=MachineLimits("avx2", 2, spread([3e10]), {"f32": spread([1e11])}),
        metrics={"a bf16 decode": metric([8.0], "tokens/s", "higher")},
        tables={
            "runs": rows,
            "engines": [{"engine": "quire", "version": "1"}, {"engine": "a", "version": "2"}],
        },
        notes=["b: left out: no wheel"],
    )
    text = markdown(result)
    assert "| decode | bf16 | 20.0 (20.0–20.0) | 8.0 (8.0–8.0) | a | 2.50 |" in text
    assert "| c8 | int8 | - | 3.0 (3.0–3.0) | a | - |" in text
    assert "b: left out: no wheel" in text
    assert "30.0 GB/s" in text
    widths = {
        line.count("|")
        for line in text.splitlines()
        if line.startswith(("| work", "|---", "| decode", "| c8"))
    }
    assert len(widths) == 2  # two tables, each of one width


class Steady:
    """An engine that takes 2 ms a token, 20 ms for the first."""

    def __init__(self, short: int = 0) -> None:
        self.short = short

    def stream(self, prompt: list[int], count: int) -> list[float]:
        start = time.perf_counter()
        return [start + 0.02 + 0.002 * i for i in range(count - self.short)]

    def batch(self, prompts: list[list[int]], count: int) -> int:
        return len(prompts) * count - self.short


def test_decode_counts_the_gaps_between_tokens() -> None:
    assert workloads.run(Steady(), "decode", random.Random(0)) == pytest.approx(500.0)


@pytest.mark.parametrize("work", ["decode", "prefill", "c8"])
def test_an_engine_that_ends_early_is_refused(work: str) -> None:
    with pytest.raises(RuntimeError, match="tokens where"):
        workloads.run(Steady(short=1), work, random.Random(0))


@pytest.mark.parametrize("work", ["c", "c0", "cx", "d8", ""])
def test_unknown_work(work: str) -> None:
    with pytest.raises(ValueError, match="work:"):
        workloads.requests_of(work)


def test_every_engine_has_its_script_and_quire_all_formats() -> None:
    folder = Path(workloads.__file__).parent
    assert all((folder / engine.script).exists() for engine in ENGINES.values())
    assert set(ENGINES["quire"].formats) >= {form for e in ENGINES.values() for form in e.formats}


def test_a_failing_command_is_named() -> None:
    with pytest.raises(PeerError, match=r"ended with 3: lib\.so is gone") as failed:
        sh(sys.executable, "-c", "import sys; print('/a/b/lib.so is gone', file=sys.stderr); sys.exit(3)")
    assert sys.executable not in str(failed.value)
