"""The same arrivals under three kinds of batching, on the scheduler alone: what lessons print in simulation 8."""

from __future__ import annotations

from collections.abc import Sequence

from quire.bench.batching import CostMachine, Job, Replay, SimulatedCost, longest_over_mean, replay
from quire.core.scheduler_config import SchedulerConfig
from quire.learn.lanes import (
    POLICIES,
    PROMPT,
    SLOTS,
    STEP,
    WAIT,
    Lane,
    LaneRequest,
    LaneStep,
    arrivals_of,
    lanes_scene,
    lengths_of,
)
from quire.learn.scene import Scene
from quire.planner.figure import Figure

_COST = SimulatedCost(base=STEP, token=0.0)


def _replayed(dues: Sequence[float], lengths: Sequence[int], policy: str) -> Replay:
    jobs = [Job(due, range(PROMPT), length) for due, length in zip(dues, lengths, strict=True)]
    config = SchedulerConfig(num_blocks=4096, max_num_seqs=SLOTS, enable_prefix_caching=False)
    return replay(jobs, config, CostMachine(_COST), policy, WAIT)


def _lane(run: Replay) -> Lane:
    return Lane(
        [LaneStep(one.begin, one.seconds, one.rows) for one in run.steps],
        [LaneRequest(one.scheduled, one.times[0], one.finished or 0.0, one.output_tokens or 0) for one in run.records],
        SLOTS,
    )  # fmt: skip


def closed_ratio(variance: int, seed: int) -> tuple[float, float]:
    """Steps of a closed batch under static batching relative to the mean length, run, and L_max / L̄."""
    lengths = lengths_of(SLOTS, variance, seed)
    run = _replayed([0.0] * SLOTS, lengths, "static")
    return len(run.steps) / (sum(lengths) / len(lengths)), longest_over_mean(lengths, SLOTS)[1]


def batching(rate: float, variance: int, requests: int, seed: int, real: bool) -> Scene:  # noqa: ARG001
    """`real` is for a server, which has the same requests answered by its engine."""
    dues, lengths = arrivals_of(rate, requests, seed), lengths_of(requests, variance, seed)
    lanes = {policy: _lane(_replayed(dues, lengths, policy)) for policy in POLICIES}
    ran, formula = closed_ratio(variance, seed)
    closed = Figure("steps of a closed batch, to the mean length", ran, "×", f"L_max / L̄ = {formula:.3f}")
    remark = (
        "A static batch lasts as long as its longest answer; places of shorter ones stay empty, and what waits behind"
        " it waits for all. Continuous batching fills a place with the next step."
    )
    return lanes_scene(lanes).beside(Scene([closed], remark=remark))
