"""A recorded load again, under other settings: what would have been, beside what was.

The load is simulated as it was and as it would be, on the machine as it was in the same seconds. An error bar holds the
simulator's error on this very load; what chance does, and the machine of other seconds; what would be at the pace of
the fastest and of the slowest part of the log all the time, as nobody knows what the machine will do; and replicas of
one machine that slow each other down as much as they can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.bench.fitted_steps import StepFit
from quire.bench.request_metrics import Summary, summarize
from quire.bench.scenario import Scenario, scenario_like, scenario_of_log
from quire.bench.simulated_arrivals import RecordedLoad
from quire.objectives import SLO
from quire.records import dataclass

FIGURES = (
    "ttft_mean", "ttft_p50", "ttft_p90", "tpot_mean", "tpot_p50", "tpot_p90", "e2el_mean", "e2el_p50", "e2el_p90",
    "request_rate", "output_token_rate", "goodput",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Guess:
    """A simulated figure, with its error bar."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureIf:
    """A figure as it was measured, as the simulator has it, and as it would be under the settings."""

    name: str
    unit: str
    measured: float | None
    now: Guess
    then: Guess

    @property
    def error(self) -> float | None:
        """How far the simulator is from what was measured, relative."""
        return abs(self.now.value / self.measured - 1) if self.measured else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """`outside` is the share of steps that have more of something than any step the fit has seen."""

    figures: list[FigureIf]
    outside: float
    preemptions: tuple[int, int]
    refused: tuple[int, int]
    left_out: tuple[int, int]


class _Runs:
    """A scenario, run with several seeds, and others once that it may turn out to be."""

    def __init__(
        self,
        fit: StepFit,
        scenario: Scenario,
        slo: SLO | None,
        seeds: Sequence[int],
        extremes: Iterable[Scenario] = (),
    ) -> None:
        self.steps = self.outside = 0
        self._fit = fit
        made = [scenario.run(seed, self._see) for seed in seeds]
        self.summaries = [summarize(run.records, slo) for run, _ in made]
        self.extremes = [summarize(one.run()[0].records, slo) for one in extremes]
        self.preemptions, self.refused = made[0][0].preemptions, len(made[0][0].refused)
        self.left_out = made[0][1]

    def _see(self, features: Sequence[float]) -> None:
        self.steps += 1
        self.outside += self._fit.outside(features)

    def values(self, name: str) -> list[float]:
        """A figure with each seed."""
        return [value for one in self.summaries if (value := _value(one, name)) is not None]

    def guess(self, name: str, error: float) -> Guess | None:
        """A figure with the first seed; on each side what any run has, and the error of the simulator beyond it."""
        values = self.values(name)
        if not values:
            return None
        values += [value for one in self.extremes if (value := _value(one, name)) is not None]
        return Guess(values[0], min(values) * (1 - error), max(values) * (1 + error))


def _value(summary: Summary, name: str) -> float | None:
    metric = summary.metrics().get(name)
    return None if metric is None or metric.value is None or not math.isfinite(metric.value) else metric.value


def what_if(
    load: RecordedLoad,
    settings: Mapping[str, str],
    slo: SLO | None = None,
    seeds: int = 3,
    like: RecordedLoad | None = None,
) -> WhatIf:
    """A load as it was, and under `settings`, on the server that recorded `like`, if it is given.

    Raises ValueError naming a setting, and SimulationError.
    """
    scenario, fits = scenario_of_log(load), (load.fit, (like or load).fit)
    changed = (scenario if like is None else scenario_like(load, like)).changed(settings)
    if slo is None and changed.classes:
        slo = changed.classes[0].slo
    was = summarize(load.records, slo) if load.records else None
    now, then = (
        _Runs(fit, one, slo, range(seeds), extremes)
        for fit, one, extremes in zip(
            fits, (scenario, changed), ((), changed.extremes(fits[1].levels)), strict=True
        )
    )
    found = []
    for name in FIGURES:
        measured = _value(was, name) if was is not None else None
        error = min(1.0, abs(now.values(name)[0] / measured - 1)) if measured and now.values(name) else 0.0
        first, second = now.guess(name, error), then.guess(name, error)
        if first is not None and second is not None:
            unit = now.summaries[0].metrics()[name].unit
            found.append(FigureIf(name=name, unit=unit, measured=measured, now=first, then=second))
    return WhatIf(
        figures=found,
        outside=then.outside / max(1, then.steps),
        preemptions=(now.preemptions, then.preemptions),
        refused=(now.refused, then.refused),
        left_out=(now.left_out, then.left_out),
    )


def errors(load: RecordedLoad, seeds: int = 1) -> dict[str, float]:
    """How far a load, simulated as it was, is from what was measured: relative, by the name of the figure. The machine
    is that of other seconds, as it will be for what is yet to come.

    Raises SimulationError.
    """
    now = _Runs(load.fit, scenario_of_log(load), None, range(1, 1 + seeds))
    was = summarize(load.records, None)
    found = {}
    for name in FIGURES:
        measured, guess = _value(was, name), now.guess(name, 0.0)
        if measured and guess is not None:
            found[name] = abs(guess.value / measured - 1)
    return found


def report(found: WhatIf, load: RecordedLoad, like: RecordedLoad | None = None) -> dict[str, Any]:
    """The same as plain data; the fit is that of the server that is asked for."""
    fit = (like or load).fit

    def bar(guess: Guess) -> dict[str, float]:
        return {"value": guess.value, "low": guess.low, "high": guess.high}

    return {
        "requests": len(load.arrivals),
        "hours": load.hours,
        "figures": {
            one.name: {
                "unit": one.unit, "measured": one.measured, "error": one.error,
                "now": bar(one.now), "then": bar(one.then),
            }
            for one in found.figures
        },
        "outside_fit": found.outside,
        "fit": {"steps": fit.steps, "error": fit.error, "region": fit.region()},
        "preemptions": found.preemptions,
        "refused": found.refused,
        "left_out": found.left_out,
    }  # fmt: skip


def lines(found: WhatIf, load: RecordedLoad, said: str, like: RecordedLoad | None = None) -> list[str]:
    """The same as text."""
    fit = (like or load).fit
    region = ", ".join(f"{name} {most:g}" for name, most in fit.region().items())
    made = [
        f"{len(load.arrivals)} requests in {load.hours * 60:.1f} minutes, with {said}",
        "",
        f"{'':<20}{'measured':>10}{'simulated':>11}{'error':>7}{'then':>11}   {'between':<23}{'change':>8}",
    ]
    for one in found.figures:
        measured = "-" if one.measured is None else f"{one.measured:.4g}"
        error = "-" if one.error is None else f"{one.error:.0%}"
        change = f"{one.then.value / one.now.value - 1:+.0%}" if one.now.value else "-"
        made.append(
            f"{one.name:<20}{measured:>10}{one.now.value:>11.4g}{error:>7}{one.then.value:>11.4g}   "
            f"{f'{one.then.low:.4g} and {one.then.high:.4g} {one.unit}':<23}{change:>8}"
        )
    made += [
        "",
        f"step times: fitted to {fit.steps} steps, off by {fit.error:.1%} in the median; seen up to {region}",
    ]
    if found.outside:
        made.append(
            f"  {found.outside:.1%} of the steps then have more than was seen: less is known of these"
        )
    for name, (before, after) in (
        ("preemptions", found.preemptions), ("requests refused", found.refused), ("requests left out", found.left_out),
    ):  # fmt: skip
        if before or after:
            made.append(f"  {name}: {before} now, {after} then")
    return made
