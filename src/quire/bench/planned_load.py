"""A deployment that a plan proposes, simulated: the real scheduler, requests by chance, step times by bounds."""

from __future__ import annotations

import random
from dataclasses import replace

from quire.bench.request_metrics import Summary, summarize
from quire.bench.scenario import Scenario
from quire.bench.simulated_server import Arrival
from quire.core.scheduler_config import SchedulerConfig
from quire.planner.deployment import RESERVE, LayoutOption, LoadDemand
from quire.routing.transfer import transfer_seconds

_REQUESTS = 300
_BLOCK = 16
_MOST_BLOCKS = 1 << 22
_TOKENS = 2048  # of a step


def planned_scenario(
    option: LayoutOption, demand: LoadDemand, *, reserve: float = RESERVE, seed: int = 0
) -> Scenario:
    """Requests that come at the rate of a load, to the replicas of a layout."""
    bound, rng, at = option.bound, random.Random(seed), 0.0
    arrivals, first = [], 1
    for _ in range(_REQUESTS):
        at += rng.expovariate(demand.rate)
        arrivals.append(Arrival(at, range(first, first + demand.prompt), demand.output))
        first = (first + demand.prompt) % (1 << 30)
    room = bound.room(reserve * bound.device.memory_gb)
    blocks = max(2, min(_MOST_BLOCKS, int(room / bound.token_bytes / _BLOCK)))
    config = SchedulerConfig(
        num_blocks=blocks, block_size=_BLOCK, max_num_seqs=1024, max_num_batched_tokens=_TOKENS,
        max_model_len=demand.prompt + demand.output + 1, enable_prefix_caching=False,
    )  # fmt: skip
    return Scenario(arrivals=arrivals, config=config, costs=bound.seconds, replicas=option.replicas)


def simulated(option: LayoutOption, demand: LoadDemand, reserve: float = RESERVE) -> Summary:
    """The figures of a layout under its load."""
    served, _ = planned_scenario(option, demand, reserve=reserve).run()
    return summarize(served.records, demand.slo)


def enough_replicas(
    option: LayoutOption, demand: LoadDemand, most: int, reserve: float = RESERVE
) -> tuple[LayoutOption, Summary]:
    """The fewest replicas, from those of the bounds on, with which the simulated load keeps its service level; with
    `most` devices if none does."""
    share = demand.slo.share if demand.slo is not None else 0.0
    while True:
        found = simulated(option, demand, reserve)
        met = found.goodput.share if found.goodput is not None else 1.0
        if met >= share or (option.replicas + 1) * option.layout.devices > most or option.layout.expert > 1:
            return option, found
        option = replace(option, replicas=option.replicas + 1)


def split_pools(
    option: LayoutOption, demand: LoadDemand, link_gb_s: float, reserve: float = RESERVE
) -> dict[int, Summary]:
    """The same replicas with 1, 2, … of them for prompts alone, whose caches move over a link."""
    made = planned_scenario(option, demand, reserve=reserve)
    size = option.bound.token_bytes * option.layout.devices
    found = {}
    for prefill in range(1, min(option.replicas, 8)):
        split = replace(
            made, prefill_replicas=prefill, transfer=lambda tokens: transfer_seconds(size * tokens, link_gb_s)
        )
        found[prefill] = summarize(split.run()[0].records, demand.slo)
    return found
