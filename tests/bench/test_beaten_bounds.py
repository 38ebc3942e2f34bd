"""No measured time beats the bound that the machine's measured limits set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.bench import kernels
from quire.bench.bounds import NOISE, beaten
from quire.bench.kernel_programs import Bench, copies_for, with_copies
from quire.bench.limits import LimitsProbe, LimitsSample
from quire.engine.build.opening import Model, open_model
from quire.executor.kinds import native_kind
from quire.planner import shapes

SHAPE = {
    **shapes.SHAPES["qwen3-0.6b"], "num_hidden_layers": 1, "vocab_size": 500, "max_position_embeddings": 512,
}  # fmt: skip
ROUNDS = 60  # until the limits have been seen; two or three are enough on a machine with nothing else to do


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    Path(folder, "config.json").write_text(json.dumps(SHAPE))
    return open_model(folder, tokenizer=False)


@pytest.fixture(scope="module")
def runner() -> kernels.Runner:
    """Copies of the weights take what the probe of the bandwidth reads, for as long: as little of both is cached."""
    asked = kernels.Asked(
        rows=(1, 128), contexts=(20,), formats=("bf16", "int8"), ops=("linear",), seconds=0.06
    )
    found = kernels.Runner(asked, threads=1)
    found.spill = found.probe.arena
    return found


def highest(probe: LimitsProbe) -> LimitsSample:
    """The highest limits in all samples so far: what else runs on a machine can only lower one."""
    compute = {name: max(one.compute[name] for one in probe.samples) for name in probe.formats}
    return LimitsSample(max(one.bandwidth for one in probe.samples), compute)


def fastest(runner: kernels.Runner, case: kernels.Case) -> Iterator[list[float]]:
    """Round by round, the shortest time so far of each step of a case."""
    smallest = min(case.steps, key=lambda rows: sum(row.query_len for row in rows))
    copied = with_copies(case.program, case.unit, copies_for(case.program, case.unit, smallest, runner.spill))
    bench = Bench(copied, kernels._limits(case), native_kind(1))
    best = [float("inf")] * len(case.steps)
    try:
        for _ in range(ROUNDS):
            for i, step in enumerate(case.steps):
                bench.fill(step)
                best[i] = min(best[i], kernels.unit_seconds(bench, runner.asked.seconds))
            yield best
    finally:
        bench.close()


def test_work_that_beats_its_bound_is_told() -> None:
    assert beaten([0.2, None, 1.0, 1 + NOISE]) == []
    (note,) = beaten([0.2, 1.3, None, 1.1])
    assert note.startswith("2 of 3 shares are beyond the bound, up to 130%")


@pytest.mark.simulator
@pytest.mark.parametrize("format_name", ["bf16", "int8"])
def test_no_measured_time_beats_the_bound(runner: kernels.Runner, model: Model, format_name: str) -> None:
    """F019. One row is bound by memory, 128 by arithmetic. The shortest times are compared with the highest limits, in
    rounds until both have been seen: work that is counted twice, or limits that are measured too low, never are."""
    cases = kernels.cases(model, runner.asked)
    case = next(one for one in cases if one.format == format_name and one.unit.name == "gate_up")
    for best in fastest(runner, case):
        runner.probe.sample()
        limits = highest(runner.probe)
        found = [
            (runner._row(case, step, [(seconds, limits)]), seconds)
            for step, seconds in zip(case.steps, best, strict=True)
        ]
        if all(row["bound_seconds"] <= (1 + NOISE) * seconds for row, seconds in found):
            break
    else:
        pytest.fail(f"bounds and times: {[(row['bound'], row['bound_seconds'], s) for row, s in found]}")
    assert [row["bound"] for row, _ in found] == ["memory", "compute"]


@pytest.mark.simulator
def test_a_bound_that_counts_twice_is_beaten(runner: kernels.Runner, model: Model) -> None:
    """Negative control: with twice the work the bound would be above what was measured."""
    cases = kernels.cases(model, runner.asked)
    case = next(one for one in cases if one.format == "bf16" and one.unit.name == "gate_up")
    shares = []
    for best in fastest(runner, case):
        runner.probe.sample()
        row = runner._row(case, case.steps[0], [(best[0], highest(runner.probe))])
        shares.append(row["share"])
        if shares[-1] > 0.5 + NOISE:
            break
    assert shares[-1] > 0.5 + NOISE, "half of the bandwidth is reached, so twice the bytes would be seen"
