"""A bounded search for the settings that serve a recorded load best, over the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.bench.request_metrics import summarize
from quire.bench.scenario import Scenario, scenario_of_log
from quire.bench.simulated_arrivals import RecordedLoad
from quire.objectives import SLO
from quire.records import dataclass

_POLICIES = ("fcfs", "sjf", "lpm", "edf", "fair")
_BEYOND = 0.2  # share of steps beyond what was seen from which settings are left out
_SAME = 0.002  # goodput that counts as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSettings:
    """Settings, the share of requests that keep the service level, and the mean seconds of a request. `error`: how far
    the simulation of the settings that were is from what was measured, relative."""

    settings: Mapping[str, str]
    goodput: float
    seconds: float
    beyond: bool
    error: float | None = None

    @property
    def score(self) -> tuple[bool, float, float]:
        """Higher is better."""
        return not self.beyond, round(self.goodput / _SAME), -self.seconds

    def said(self) -> str:
        """The settings on a line."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())

    def report(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "settings": dict(self.settings), "goodput_share": self.goodput, "seconds": self.seconds,
            "beyond_fit": self.beyond, "error": self.error,
        }  # fmt: skip


def tune(load: RecordedLoad, slo: SLO, most: int, rate: float = 1.0) -> list[TunedSettings]:
    """What was tried, the settings of the log first: from the best so far one setting is changed at a time, until no
    change is better or `most` simulations have run."""
    scenario, config = scenario_of_log(load).faster(rate), load.config
    first = {
        "max_num_seqs": str(config.max_num_seqs), "max_num_batched_tokens": str(config.max_num_batched_tokens),
        "scheduling_policy": config.policy,
    }  # fmt: skip
    tried = [_tried(scenario, load, slo, first, was=True, measured=rate == 1.0)]
    seen, best = {tried[0].said()}, tried[0]
    while True:
        before = best
        for settings in _neighbours(best.settings):
            if len(tried) >= most:
                return tried
            one = " ".join(f"{name}={value}" for name, value in settings.items())
            if one in seen:
                continue
            seen.add(one)
            tried.append(_tried(scenario, load, slo, settings))
            if tried[-1].score > best.score:
                best = tried[-1]
        if best is before:
            return tried


def _neighbours(settings: Mapping[str, str]) -> Iterator[dict[str, str]]:
    for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 16)):
        value = int(settings[name])
        for other in (value // 2, value * 2, value // 4):
            if other >= least:
                yield {**settings, name: str(other)}
    for policy in _POLICIES:
        yield {**settings, "scheduling_policy": policy}


def _tried(
    scenario: Scenario,
    load: RecordedLoad,
    slo: SLO,
    settings: Mapping[str, str],
    *,
    was: bool = False,
    measured: bool = False,
) -> TunedSettings:
    steps = [0, 0]

    def look(features: Sequence[float]) -> None:
        steps[0] += 1
        steps[1] += load.fit.outside(features)

    served, _ = scenario.changed(settings).run(seen=look)
    summary = summarize(served.records, slo)
    mean = summary.distributions["e2el"].mean / 1e3 if "e2el" in summary.distributions else float("inf")
    error = None
    if measured and load.records:
        error = abs(mean * 1e3 / summarize(load.records).distributions["e2el"].mean - 1)
    return TunedSettings(
        settings=dict(settings), goodput=summary.goodput.share if summary.goodput else 0.0, seconds=mean,
        beyond=not was and steps[1] > _BEYOND * steps[0], error=error,
    )  # fmt: skip
