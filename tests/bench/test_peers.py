"""The comparison with other engines: its arithmetic and its table, without any of them."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import quire

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers import burst, runs, summary, workloads
from benchmarks.peers.__main__ import arguments, units
from benchmarks.peers.engines import ENGINES, PeerError, sh
from benchmarks.peers.runs import Unit
from benchmarks.peers.table import best_peer, markdown

from quire.bench.recording import Recording
from quire.bench.results import MachineLimits, metric, spread
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.program import Program
from quire.spec.facts import read_model

DEFAULT = Path(quire.__file__).parent / "models" / "quire-mini"


def row(
    engine: str, value: float, work: str = "decode", form: str = "bf16", own: str = "", number: int = 0
) -> dict[str, Any]:
    return {
        "round": number, "engine": engine, "format": form, "its_format": own or form, "work": work, "value": value
    }  # fmt: skip


def found(rows: list[dict[str, Any]]) -> dict[Any, Any]:
    return {key: spread(values) for key, values in runs.samples(rows).items()}


def test_ratio_is_to_the_best_of_the_others() -> None:
    rows = [row("quire", 30.0), row("quire", 10.0, number=1), row("quire", 20.0, number=2)]
    rows += [row("a", 5.0), row("b", 6.0, own="x"), row("b", 8.0, own="y")]
    assert best_peer(found(rows), "bf16", "decode") == ("b", "bf16", "y", "decode")
    assert best_peer(found(rows), "int8", "decode") is None
    assert runs.gain("decode", 20.0, 8.0) == 2.5


def test_quire_with_8_bit_keys_and_values_is_no_peer() -> None:
    rows = [row("quire", 3.0, form="int8"), row("quire-kv8", 9.0, form="int8", own="int8-kv8")]
    assert best_peer(found(rows), "int8", "decode") is None
    rows.append(row("a", 2.0, form="int8"))
    assert best_peer(found(rows), "int8", "decode") == ("a", "int8", "int8", "decode")
    assert runs.contends(rows, Unit(1, "quire-kv8", "int8", "int8-kv8", ("decode",)), 1.0)


def test_seconds_are_better_when_fewer() -> None:
    rows = [row("quire", 2.0, "first"), row("a", 5.0, "first"), row("b", 3.0, "first")]
    assert best_peer(found(rows), "bf16", "first") == ("b", "bf16", "bf16", "first")
    assert runs.gain("first", 2.0, 3.0) == 1.5


def test_table() -> None:
    rows = [{**row("quire", 20.0), "bound": 25.0}, {**row("a", 8.0), "bound": 20.0}]
    rows += [row("a", 3.0, "c8", "int8"), row("a", 900.0, "memory of c8")]
    rows += [row("a", 4.0, "c8", "int8", own="other"), row("a", 950.0, "memory of c8")]
    result = Recording("peers", ["python", "-m", "benchmarks.peers"]).result(
        settings={"shape": "tiny"},
        limits=MachineLimits("avx2", 2, spread([3e10]), {"f32": spread([1e11])}),
        metrics={"a bf16 decode": metric([8.0], "tokens/s", "higher")},
        tables={
            "runs": rows,
            "engines": [{"engine": "quire", "version": "1"}, {"engine": "a", "version": "2"}],
        },
        notes=["b: left out: no wheel"],
    )
    text = markdown(result)
    assert "| decode | bf16 | 20.0 (1) | 8.0 (1) | a | 2.50 | 2.00 | 25.0 | 80% |" in text
    assert "| c8 | int8 | - | int8 3.0 (1); other 4.0 (1) | a other | - | - | - | - |" in text
    assert "| memory of c8, MiB | bf16 | - | 950 (1) | a | - | - | - | - |" in text, (
        "the most of a round's processes"
    )
    assert "b: left out: no wheel" in text
    assert "30.0 GB/s" in text
    starts = ("| work", "|---", "| decode", "| c8", "| memory")
    widths = {line.count("|") for line in text.splitlines() if line.startswith(starts)}
    assert len(widths) == 2  # two tables, each of one width


def test_a_comparison_goes_on_where_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "new" / "runs.jsonl"
    unit = Unit(0, "a", "int8", "Q8_0", ("decode", "c8"))
    assert not runs.done(runs.read(file), unit)
    half = {"lines": [{"work": "decode", "value": 5.0}], "memory": 9.0, "error": "ended with 1: no memory"}
    runs.append(file, runs.rows_of(unit, half))
    assert not runs.done(runs.read(file), unit)
    assert runs.failures(runs.read(file)) == ["a Q8_0 c8: ended with 1: no memory"]
    runs.append(file, runs.rows_of(unit, {"lines": [{"work": w, "value": 6.0} for w in unit.works]}))
    rows = runs.read(file)
    assert [row["work"] for row in rows if "memory" in row["work"]] == ["memory of decode"]
    assert runs.done(rows, unit)
    assert runs.failures(rows) == []
    assert runs.samples(rows)["a", "int8", "Q8_0", "decode"] == [6.0], "one figure a round, the latest"
    assert not runs.done(rows, Unit(1, "a", "int8", "Q8_0", ("decode",)))


def test_only_contenders_are_repeated() -> None:
    rows = [row("quire", 1.0), row("a", 10.0), row("b", 8.1), row("c", 7.0), row("c", 99.0, "c8")]
    again = [e for e in ("quire", "a", "b", "c", "new") if runs.contends(rows, unit_of(e), 0.8)]
    assert again == ["quire", "a", "b", "new"]
    first = [row("a", 2.0, "first"), row("b", 2.4, "first"), row("c", 2.6, "first")]
    assert [e for e in "abc" if runs.contends(first, unit_of(e, "first"), 0.8)] == ["a", "b"]
    assert runs.contends(rows, unit_of("c"), 0.0)


def unit_of(engine: str, work: str = "decode") -> Unit:
    return Unit(1, engine, "bf16", "bf16", (work,))


def test_rounds_begin_with_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--peers", "quire,llama.cpp,openvino", "--formats", "int4", "--work", "decode+c8,first"]
    monkeypatch.setattr(sys, "argv", ["peers", *words, "--prefix", "taskset -c 0"])
    args = arguments()
    assert args.prefix == ["taskset", "-c", "0"]
    models = {(n, own): Path() for n in ("quire", "llama.cpp") for own in ENGINES[n].formats["int4"]}
    names = [
        [(u.engine, u.its_format) for u in units(args, models, n) if u.works == ("first",)] for n in range(2)
    ]
    assert names[0] == [("quire", "int4"), ("llama.cpp", "Q4_0"), ("llama.cpp", "Q4_K_M")]
    assert names[1] == [*names[0][1:], names[0][0]]
    assert {u.works for u in units(args, models, 0)} == {("decode", "c8"), ("first",)}


@pytest.mark.parametrize("word", ["decode+first", "c8,other", "decode+"])
def test_bad_work_is_refused(word: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "--work", word])
    with pytest.raises(SystemExit):
        arguments()
    assert "work:" in capsys.readouterr().err


SCRIPT = """
import json, sys
held = bytearray(int(sys.argv[1]) << 20)
print("some library's greeting")
print(json.dumps({"work": "decode", "value": 7.0}))
sys.exit(int(sys.argv[2]))
"""


def test_a_measured_process() -> None:
    small = burst.run([sys.executable, "-c", SCRIPT, "1", "0"], {})
    large = burst.run([sys.executable, "-c", SCRIPT, "400", "3"], {"LD_DEBUG_OUTPUT": "x"})
    assert small["lines"] == large["lines"] == [{"work": "decode", "value": 7.0}]
    assert large["memory"] > 400
    assert "error" not in small
    assert large["error"].startswith("ended with 3")


def test_bound_of_a_workload_is_its_steps() -> None:
    """Memory alone: a decode step reads the weights and the keys and values so far, c8 the weights once for all."""
    program: Program = lower(read_model(DEFAULT).spec, NumberFormats())
    compute = {"f32": 1e30, "bf16": 1e30, "i8": 1e30}
    one, eight = (summary.bound(summary.needs(program, work), 1e9, compute) for work in ("decode", "c8"))
    weights = summary.step_cost(program, [summary.Row(1, 0)], 1).total.weight_bytes
    assert 0.5 * 1e9 / weights < one < 1e9 / weights
    assert one < eight < 8 * one
    slow = dict.fromkeys(compute, 1e9)
    flops = summary.step_cost(program, [summary.Row(1024, 0)], 1).total.flops
    assert summary.bound(summary.needs(program, "prefill"), 1e30, slow) == pytest.approx(1024 * 1e9 / flops)


def test_each_row_is_bound_by_its_own_limits() -> None:
    fast = {"bandwidth": 2e9, "compute": dict.fromkeys(("f32", "bf16", "i8"), 1e30)}
    rows = [
        {**row("quire", 1.0), **fast},
        {**row("a", 1.0), **fast, "bandwidth": 1e9},
        row("a", 9.0, "memory"),
    ]
    ours, theirs, memory = summary.with_bounds(DEFAULT, rows)
    assert ours["bound"] == pytest.approx(2 * theirs["bound"])
    assert "bound" not in memory


class Steady:
    """An engine that takes 2 ms a token, 20 ms for the first."""

    def __init__(self, short: int = 0) -> None:
        self.short = short

    def stream(self, prompt: list[int], count: int) -> list[float]:
        start = time.perf_counter()
        return [start + 0.02 + 0.002 * i for i in range(count - self.short)]

    def batch(self, prompts: list[list[int]], count: int) -> int:
        return len(prompts) * count - self.short


def test_half_the_bytes_of_keys_and_values_raise_the_bound() -> None:
    limits = {"bandwidth": 1e6, "compute": {"f32": 1e15, "bf16": 1e15, "i8": 1e15}}
    rows = [
        {**row("quire", 1.0, "c32", "int8"), **limits},
        {**row("quire-kv8", 1.0, "c32", "int8", "int8-kv8"), **limits},
    ]
    plain, small = (one["bound"] for one in summary.with_bounds(DEFAULT, rows))
    assert plain < small < 2 * plain


def test_decode_counts_the_gaps_between_tokens() -> None:
    assert workloads.run(Steady(), "decode", random.Random(0)) == pytest.approx(500.0)


@pytest.mark.parametrize("work", ["decode", "prefill", "c8"])
def test_an_engine_that_ends_early_is_refused(work: str) -> None:
    with pytest.raises(RuntimeError, match="tokens where"):
        workloads.run(Steady(short=1), work, random.Random(0))


@pytest.mark.parametrize("work", ["c", "c0", "cx", "d8", ""])
def test_unknown_work(work: str) -> None:
    with pytest.raises(ValueError, match="work:"):
        workloads.check_work(work)


def test_seconds_since_the_process_started() -> None:
    code = "import workloads, time; time.sleep(0.2); print(workloads.since_start())"
    folder = str(Path(workloads.__file__).parent)
    assert 0.2 <= float(sh(sys.executable, "-c", code, env={"PYTHONPATH": folder})) < 60


def test_every_engine_has_its_script_and_quire_all_formats() -> None:
    folder = Path(workloads.__file__).parent
    assert all((folder / engine.script).exists() for engine in ENGINES.values())
    assert set(ENGINES["quire"].formats) >= {form for e in ENGINES.values() for form in e.formats}


def test_a_failing_command_is_named() -> None:
    with pytest.raises(PeerError, match=r"ended with 3: lib\.so is gone") as failed:
        sh(sys.executable, "-c", "import sys; print('/a/b/lib.so is gone', file=sys.stderr); sys.exit(3)")
    assert sys.executable not in str(failed.value)
