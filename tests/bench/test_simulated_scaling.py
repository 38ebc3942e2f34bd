"""The rule for the number of servers on a virtual clock, beside a reactive one and beside numbers that never change."""

from __future__ import annotations

import math
import random

import pytest

from quire.bench.simulated_scaling import ScaledRun, by_forecast, by_utilization, run
from quire.bench.traces import TraceRow
from quire.routing.servers_needed import ScalingBounds

EACH, LEVEL, FIRST = 8e-4, 2.0, 4


def waves(seed: int, *, seconds: int = 4 * 3600, mean: float = 5.0) -> list[TraceRow]:
    """Requests whose number rises and falls with a period of an hour, by four times."""
    noise, at, found = random.Random(seed), 0.0, []
    while at < seconds:
        rate = mean * (1 + 0.6 * math.sin(2 * math.pi * at / 3600))
        at += noise.expovariate(rate)
        found.append(TraceRow(at, noise.randint(100, 1500), noise.randint(10, 300)))
    return found


def served(rows: list[TraceRow], start: float, down: float) -> tuple[ScaledRun, ScaledRun]:
    """By the forecast, and reactively."""
    bounds = ScalingBounds(1, 40, down=down)
    own, other = by_forecast(LEVEL, start, bounds, EACH, FIRST), by_utilization(bounds, EACH, FIRST)
    return tuple(
        run(rows, each, level=LEVEL, start=start, token_seconds=EACH, first=FIRST) for each in (own, other)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(3))
def test_a_load_that_is_forecast_is_met_in_time(seed: int) -> None:
    """With servers that take minutes to start it is late less often than the reactive rule; with ours hardly at all."""
    rows = waves(seed)
    own, other = served(rows, 300.0, 300.0)
    assert own.late <= other.late
    own, other = served(rows, 2.0, 60.0)
    assert own.late < 0.01
    fixed = run(rows, lambda _: own.most, level=LEVEL, start=2.0, token_seconds=EACH, first=own.most)
    assert own.hours < 0.8 * fixed.hours


def test_no_server_is_paid_for_that_nobody_needs() -> None:
    rows = [TraceRow(0.0, 500, 50), TraceRow(7200.0, 500, 50)]
    bounds = ScalingBounds(0, 4, down=60.0, idle=300.0)
    found = run(
        rows, by_forecast(LEVEL, 2.0, bounds, EACH, 0), level=LEVEL, start=2.0, token_seconds=EACH, first=0
    )
    assert found.hours < 0.25
    assert found.late == 1.0, "each of them waited for its server, and for its prompt"
    assert found.most == 1


def test_the_fluid_does_all_work_once() -> None:
    """What servers do in a second is a second: three of them compute three seconds of prompts, and streams cost."""
    rows = [TraceRow(0.0, round(1 / EACH), 1) for _ in range(6)]
    found = run(rows, lambda _: 3, level=1.1, start=2.0, token_seconds=EACH, first=3)
    assert found.late == pytest.approx(0.5, abs=0.01), "three were done after one second, three after two"
