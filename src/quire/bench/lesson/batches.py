"""The same arrivals under three kinds of batching: simulation 8."""

from __future__ import annotations

import random

from quire.bench.batching import POLICIES, CostMachine, Job, Replay, SimulatedCost, longest_over_mean, replay
from quire.bench.timeline import request_metrics
from quire.core.scheduler_config import SchedulerConfig
from quire.learn.scene import Chart, ChartSeries, Scene, Table
from quire.planner.figure import Figure

_SLOTS, _MEAN, _PROMPT, _WAIT = 8, 40, 16, 0.2
_COST = SimulatedCost(base=0.02, token=0.0)


def lengths_of(count: int, variance: int, seed: int) -> list[int]:
    """Lengths of outputs around a mean, up to `variance` percent more or less."""
    rng = random.Random(seed)
    spread = _MEAN * variance // 100
    return [max(1, _MEAN + rng.randint(-spread, spread)) for _ in range(count)]


def _replays(rate: float, variance: int, requests: int, seed: int) -> dict[str, Replay]:
    rng, at = random.Random(f"arrivals {seed}"), 0.0
    jobs: list[Job] = []
    for length in lengths_of(requests, variance, seed):
        jobs.append(Job(at, range(_PROMPT), length))
        at += rng.expovariate(rate)
    config = SchedulerConfig(num_blocks=4096, max_num_seqs=_SLOTS, enable_prefix_caching=False)
    return {policy: replay(jobs, config, CostMachine(_COST), policy, _WAIT) for policy in POLICIES}


def _lane(name: str, run: Replay) -> ChartSeries:
    """Sequences of each step, and none between steps that do not follow each other."""
    points: list[tuple[float, float]] = []
    for step, after in zip(run.steps, [*run.steps[1:], None], strict=True):
        end = step.begin + step.seconds
        points.append((step.begin, step.rows))
        if after is None or after.begin > end + 1e-9:
            points += [(end, step.rows), (end, 0.0)]
            if after is not None:
                points.append((after.begin, 0.0))
    return ChartSeries(name, [at for at, _ in points], [rows for _, rows in points])


def closed_ratio(variance: int, seed: int) -> tuple[float, float]:
    """Steps of a closed batch under static batching relative to the mean length, run, and L_max / L̄."""
    lengths = lengths_of(_SLOTS, variance, seed)
    jobs = [Job(0.0, range(_PROMPT), length) for length in lengths]
    config = SchedulerConfig(num_blocks=4096, max_num_seqs=_SLOTS, enable_prefix_caching=False)
    run = replay(jobs, config, CostMachine(_COST), "static")
    return len(run.steps) / (sum(lengths) / len(lengths)), longest_over_mean(lengths, _SLOTS)[1]


def batching(rate: float, variance: int, requests: int, seed: int) -> Scene:
    runs = _replays(rate, variance, requests, seed)
    rows: list[tuple[str, ...]] = []
    figures: list[Figure] = []
    for name, run in runs.items():
        figures_of = [request_metrics(one) for one in run.records]
        end = max(one.finished or 0.0 for one in run.records)
        mean = sum(one.e2e for one in figures_of) / len(figures_of)
        waits = sum(one.times[0] - one.scheduled for one in run.records) / len(run.records)
        padding = sum(_SLOTS - step.rows for step in run.steps)
        tokens = sum(one.output_tokens or 0 for one in run.records)
        rows.append((name, f"{100 * run.slot_use:.0f} %", f"{mean:.2f} s", f"{waits:.2f} s", f"{padding:,}",
                     f"{tokens / end:.0f}", f"{tokens:,}"))  # fmt: skip
        figures.append(
            Figure(f"{name}: places in use", 100 * run.slot_use, "%", f"mean latency {mean:.2f} s")
        )
    ran, formula = closed_ratio(variance, seed)
    figures.append(
        Figure("steps of a closed batch, to the mean length", ran, "×", f"L_max / L̄ = {formula:.3f}")
    )
    table = Table(
        "The same requests",
        (
            "batching",
            "places in use",
            "mean latency",
            "wait for the first token",
            "empty places",
            "tokens/s",
            "tokens",
        ),
        rows,
    )
    lanes = Chart(
        "Sequences in each step", "lines", "seconds", f"of {_SLOTS} places",
        [_lane(name, run) for name, run in runs.items()],
        levels=[("places", float(_SLOTS))],
    )  # fmt: skip
    return Scene(
        figures, [lanes], tables=[table],
        remark="A static batch lasts as long as its longest answer; places of shorter ones stay empty, and what waits"
        " behind it waits for all. Continuous batching fills a place with the next step.",
    )  # fmt: skip
