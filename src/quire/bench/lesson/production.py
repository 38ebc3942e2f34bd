"""A whole server under load: simulation 16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.bench.goodput import PRESETS
from quire.bench.lesson.plant import Plant, load, settings
from quire.bench.request_metrics import Summary, summarize
from quire.bench.simulated_server import SimulatedServer
from quire.bench.timeline import RequestRecord
from quire.learn.catalog import card
from quire.learn.scene import Chart, ChartSeries, Scene
from quire.planner.figure import Figure
from quire.records import dataclass

LAYOUTS = ("tensor parallel", "replicas")
_POINTS = 160  # of a chart


@dataclass(frozen=True, slots=True)
class ServerMoment:
    """A server before one of its steps."""

    at: float
    waiting: int
    running: int
    held: float  # share of its blocks


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """What came of a load."""

    records: list[RequestRecord]
    summary: Summary
    steps: list[ServerMoment]
    hit_share: float

    def mean(self, name: str) -> float:
        """A latency, in milliseconds."""
        found = self.summary.distributions.get(name)
        return 0.0 if found is None else found.mean

    @property
    def tokens_per_second(self) -> float:
        return sum(one.output_tokens or 0 for one in self.records) / max(
            one.finished or 0.0 for one in self.records
        )

    @property
    def growth(self) -> float:
        """Sequences that wait in the last quarter of the arrivals, less those in the second: above 0 a queue grows."""
        end = max(one.scheduled for one in self.records)
        second, last = (
            [one.waiting for one in self.steps if low * end <= one.at < high * end]
            for low, high in ((0.25, 0.5), (0.75, 1.0))
        )
        return _mean(last) - _mean(second)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def outcome(plant: Plant, rate: float, seed: int, seconds: float | None = None) -> LoadOutcome:
    """Serve the load of servers.toml at a rate."""
    steps: list[ServerMoment] = []

    def look(server: SimulatedServer) -> None:
        scheduler = server.scheduler
        held = scheduler.blocks_used / scheduler.config.num_blocks
        steps.append(ServerMoment(server.now, scheduler.num_waiting, scheduler.num_running, held))

    run = plant.serve(load(rate, seed=seed, seconds=seconds), seed=seed, look=look)
    slo = PRESETS[settings("server")["preset"]][0]
    return LoadOutcome(
        run.records, summarize(run.records, slo), sorted(steps, key=lambda one: one.at), run.hit_share
    )


def production(rate: float, gpus: int, layout: str, seed: int, **given: Any) -> Scene:
    """`given` are fields of a Plant; the device by its title."""
    tensor = layout == LAYOUTS[0]
    given["device"] = card(given["device"])
    plant = Plant(cards=gpus if tensor else 1, replicas=1 if tensor else gpus, **given)
    found = outcome(plant, rate, seed)
    good = found.summary.goodput
    end = max(one.scheduled for one in found.records)
    figures = [
        Figure("output", found.tokens_per_second, "tokens/s"),
        Figure("TTFT, mean", found.mean("ttft"), "ms"),
        Figure("ITL, mean", found.mean("itl"), "ms", "between two tokens of an answer"),
        Figure("E2EL, mean", found.mean("e2el"), "ms"),
        Figure("goodput", 0.0 if good is None else good.rate, "requests/s",
               f"of {rate:g}; {PRESETS[settings('server')['preset']][0]} ms"),
        Figure("longest queue", max(one.waiting for one in found.steps), "sequences",
               "it grows" if found.growth > 1 else "it does not grow"),
        Figure("blocks held, at most", 100 * max(one.held for one in found.steps), "%",
               f"of a cache of {plant.cache_tokens:,} tokens"),
        Figure("prompt tokens from the cache", 100 * found.hit_share, "%"),
        Figure("answers complete", len(found.records), "", f"of requests that come in {end:.0f} s"),
    ]  # fmt: skip
    steps = found.steps[:: max(1, len(found.steps) // _POINTS)]
    at = [one.at for one in steps]
    charts = [
        Chart("Sequences", "lines", "seconds", "sequences",
              [ChartSeries("waiting", at, [one.waiting for one in steps]),
               ChartSeries("running", at, [one.running for one in steps])]),
        Chart("First tokens", "lines", "second of arrival", "ms to the first token",
              [ChartSeries("TTFT", [one.scheduled for one in found.records],
                           [1e3 * (one.times[0] - one.scheduled) for one in found.records])]),
        Chart("The cache", "lines", "seconds", "% of blocks held",
              [ChartSeries("held", at, [100 * one.held for one in steps])]),
    ]  # fmt: skip
    return Scene(
        figures, charts,
        remark="Steps take what the device allows at best, so real servers are slower. Speculation is an expectation:"
        " its drafts are not run.",
    )  # fmt: skip
