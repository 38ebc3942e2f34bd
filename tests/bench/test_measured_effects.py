"""The twelve techniques, measured on a real engine: each has a figure, or says why it has none. None is judged."""

from __future__ import annotations

import itertools

import pytest

from quire.bench.measured_effects import HERE, MeasuredWork, measured_effects, work_of
from quire.bench.technique_effects import effects
from quire.config.shipped import shipped_models
from quire.planner.deployment import LoadDemand
from quire.planner.devices import device
from quire.planner.model_size import size_of_config
from quire.planner.shapes import SHAPES
from quire.planner.step_bound import StepBound

MODEL = str(shipped_models()["quire-mini"])


def test_lengths_are_bounded() -> None:
    work = work_of(MODEL, LoadDemand(prompt=8000, output=2000), 2000)
    assert (work.prompt, work.output, work.shared) == (512, 48, 128)
    assert work.longest >= work.prompt + 4 * work.output
    short = work_of(MODEL, LoadDemand(prompt=3, output=1), 0)
    assert 0 < short.shared < short.prompt


def test_engines_with_and_without_are_compared() -> None:
    heard: list[str] = []
    work = MeasuredWork(MODEL, 32, 8, 16, rounds=1)
    found = list(itertools.islice(measured_effects(work, heard.append), 3))
    assert heard == ["continuous batching", "FlashAttention", "PagedAttention"] == [one.name for one in found]
    assert all(one.factor is not None and one.factor > 0 and one.source == HERE for one in found)
    traffic = next(one for one in found if one.name == "FlashAttention")
    assert traffic.factor is not None
    assert traffic.factor > 1, "counted, not timed"


@pytest.mark.simulator
def test_all_twelve_techniques() -> None:
    bound = StepBound(model=size_of_config(SHAPES["llama-3-8b"]), device=device("h100"))
    names = [one.name for one in effects(bound, LoadDemand(), 8, 100)]
    found = {one.name: one for one in measured_effects(MeasuredWork(MODEL, 48, 8, 32, rounds=1))}
    assert sorted(found) == sorted(names)
    without = {name for name, one in found.items() if one.factor is None}
    assert "expert parallelism" in without
    assert without <= {
        "data parallelism", "expert parallelism", "tensor parallelism", "pipeline parallelism", "quantization"
    }, {name: found[name].says for name in without}  # fmt: skip
    assert "one processor" in found["data parallelism"].says or "data parallelism" not in without
    assert "no experts" in found["expert parallelism"].says
