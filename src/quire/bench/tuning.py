"""A bounded search for the settings that serve a recorded load best, over the simulator; then a check on an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.bench.batching import Job, RealMachine, replay
from quire.bench.fitted_steps import StepFit
from quire.bench.request_metrics import Summary, summarize
from quire.bench.scenario import Scenario, scenario_of_log
from quire.bench.simulated_arrivals import RecordedLoad
from quire.core.cost_model import FEATURES
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.core import StepExecutor
from quire.objectives import SLO
from quire.records import dataclass

_POLICIES = ("fcfs", "sjf", "lpm", "edf", "fair")
_BEYOND = 0.2  # share of steps beyond what was seen from which settings are left out
_SAME = 0.002  # goodput that counts as equal
_WARM = 8  # requests, and tokens of each, before a check


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSettings:
    """Settings, the share of requests that keep the service level, and the mean seconds of a request. `error`: how far
    the simulation of the mean is from what was measured, relative. `beyond`: what of most of the steps is more than a
    log can tell of, if there is anything."""

    settings: Mapping[str, str]
    goodput: float
    seconds: float
    beyond: str = ""
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
            "beyond_fit": bool(self.beyond), "beyond": self.beyond, "error": self.error,
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
    reach = load.fit.reach()
    steps, far = 0, [0] * len(reach)

    def look(features: Sequence[float]) -> None:
        nonlocal steps
        steps += 1
        for i, (value, most) in enumerate(zip(features, reach, strict=True)):
            far[i] += value > most

    served, _ = scenario.changed(settings).run(seen=look)
    share, mean = _figures(summarize(served.records, slo))
    error = None
    if measured and load.records:
        error = abs(mean * 1e3 / summarize(load.records).distributions["e2el"].mean - 1)
    return TunedSettings(
        settings=dict(settings), goodput=share, seconds=mean,
        beyond="" if was else _beyond(load.fit, reach, [count / max(1, steps) for count in far]), error=error,
    )  # fmt: skip


def _beyond(fit: StepFit, reach: Sequence[float], shares: Sequence[float]) -> str:
    """What most of the steps are beyond, and how far the log tells."""
    share, place = max((share, place) for place, share in enumerate(shares))
    if share <= _BEYOND:
        return ""
    name, seen = FEATURES[place].replace("_", " "), fit.most[place]
    return f"{share:.0%} of the steps have over {reach[place]:.0f} {name}; the log has up to {seen:.0f}"


def unjudged(tried: Sequence[TunedSettings]) -> TunedSettings | None:
    """The settings that would be better than the best, if they could be told of; None if there are none."""
    best = max(tried, key=lambda one: one.score)
    found = max((one for one in tried if one.beyond), key=lambda one: one.score, default=None)
    return found if found is not None and found.score[1:] > best.score[1:] else None


def _figures(summary: Summary) -> tuple[float, float]:
    """The share of requests that keep the service level, and the mean seconds of one."""
    times = summary.distributions
    return (
        summary.goodput.share if summary.goodput else 0.0,
        times["e2el"].mean / 1e3 if "e2el" in times else float("inf"),
    )


def limits_for(config: SchedulerConfig, tried: Sequence[TunedSettings]) -> SchedulerConfig:
    """Those of an engine that can run under all of these settings."""
    most = {
        name: max(getattr(config, name), *(int(one.settings[name]) for one in tried))
        for name in ("max_num_seqs", "max_num_batched_tokens")
    }
    return replace(config, **most)


def checked(
    load: RecordedLoad,
    tried: Sequence[TunedSettings],
    slo: SLO,
    worker: StepExecutor,
    vocab: int,
    rate: float = 1.0,
) -> list[TunedSettings]:
    """The same requests on a real engine, under each of the settings, at the pace at which they came: measured in place
    of simulated. Prompts are random tokens that share what the recorded ones do, all of one client."""
    scenario = scenario_of_log(load).faster(rate)
    jobs = [Job(one.at, _tokens(one.prompt, vocab), one.output) for one in scenario.arrivals]
    warm = [Job(0.0, job.prompt, min(_WARM, job.output_tokens)) for job in jobs[:_WARM]]
    machine, found = RealMachine(worker), []
    for one in tried:
        limits = replace(scenario.changed(one.settings).config, max_draft_tokens=0, steps_in_flight=1)
        replay(warm, limits, machine)
        share, mean = _figures(summarize(replay(jobs, limits, machine).records, slo))
        found.append(replace(one, goodput=share, seconds=mean, beyond="", error=abs(one.seconds / mean - 1)))
    return found


def _tokens(ids: Sequence[int], vocab: int) -> list[int]:
    """Equal ids become equal tokens of a vocabulary, others mostly different ones."""
    return [(one * 2654435761 % 2**32) * vocab >> 32 for one in ids]
