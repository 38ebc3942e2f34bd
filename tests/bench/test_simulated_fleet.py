"""Replicas, routers and separate prefill in the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.bench.request_metrics import summarize
from quire.bench.simulated_fleet import SimulatedFleet
from quire.bench.simulated_server import Arrival, SimulatedRun, SimulatedServer
from quire.core.scheduler_config import SchedulerConfig
from quire.routing.router_policies import POLICIES, RoutedPrompt, policy_named
from quire.routing.transfer import transfer_seconds

COSTS = (0.004, 2e-4, 1e-4, 0.0, 0.0, 0.0, 0.0, 0.0)
LIMITS = SchedulerConfig(num_blocks=800, block_size=8, max_num_seqs=16, max_num_batched_tokens=128)


def arrivals(seed: int, count: int, rate: float, templates: int = 1) -> list[Arrival]:
    rng, at, found = random.Random(seed), 0.0, []
    bases = [[rng.randrange(1, 9999) for _ in range(160)] for _ in range(templates)]
    for _ in range(count):
        at += rng.expovariate(rate)
        own = [rng.randrange(1, 9999) for _ in range(rng.randint(10, 60))]
        found.append(Arrival(at, [*rng.choice(bases), *own], rng.randint(5, 30)))
    return found


def serve(asked: list[Arrival], replicas: int, router: str = "least-work", *, prefill: int = 0,
          late: float = 0.0) -> tuple[SimulatedRun, SimulatedFleet]:  # fmt: skip
    def make(seed: int, received: bool) -> SimulatedServer:
        return SimulatedServer(LIMITS, COSTS, noise=0.0, seed=seed, received=received)

    fleet = SimulatedFleet(make, replicas, policy_named(router, 0), prefill=prefill, transfer=lambda _: late)
    return fleet.run(asked), fleet


def test_one_replica_is_the_server() -> None:
    asked = arrivals(1, 80, 30.0)
    alone = SimulatedServer(LIMITS, COSTS, noise=0.0).run(asked)
    fleet, _ = serve(asked, 1)
    assert [one.times for one in fleet.records] == [one.times for one in alone.records]
    assert (fleet.steps, fleet.hit_share) == (alone.steps, alone.hit_share)


@pytest.mark.parametrize("router", POLICIES)
def test_every_router_serves_all_and_uses_all_replicas(router: str) -> None:
    asked = arrivals(2, 90, 120.0, templates=12)
    served, fleet = serve(asked, 3, router)
    assert [one.output_tokens for one in served.records] == [one.output for one in asked]
    assert min(server.steps for server in fleet.servers) > 0


def test_two_replicas_wait_less_than_one_and_cached_prefixes_are_found() -> None:
    asked = arrivals(3, 150, 80.0, templates=6)
    waits = {n: summarize(serve(asked, n)[0].records).distributions["ttft"].mean for n in (1, 2)}
    assert waits[2] < waits[1] / 2
    hits = {name: serve(asked, 4, name)[0].hit_share for name in ("round-robin", "prefix")}
    assert hits["prefix"] > hits["round-robin"]


def test_a_router_chooses_by_what_it_knows() -> None:
    """One that takes all prompts for new ones sends them where they are cached by chance alone."""
    asked, numbers = arrivals(3, 150, 80.0, templates=6), list[int]()

    def known(number: int, prompt: RoutedPrompt) -> RoutedPrompt:
        numbers.append(number)
        return replace(prompt, cached=lambda _: 0.0)

    def make(seed: int, received: bool) -> SimulatedServer:
        return SimulatedServer(LIMITS, COSTS, noise=0.0, seed=seed, received=received)

    blind = SimulatedFleet(make, 4, policy_named("prefix"), known=known).run(asked)
    assert numbers == [*range(len(asked))]
    assert 0 < blind.hit_share < serve(asked, 4, "prefix")[0].hit_share


def test_what_is_being_computed_is_known_until_its_first_token() -> None:
    """Also where it waits; equal prompts that come together find nothing cached meanwhile."""
    asked = [Arrival(0.01 * number, [*range(1, 401)], 4) for number in range(3)]
    asked.append(Arrival(60.0, [1, 2, 3], 4))
    computing, cached = list[list[int]](), list[float]()

    def known(number: int, prompt: RoutedPrompt) -> RoutedPrompt:
        computing.append([before for before in range(number) if fleet.is_computing(before)])
        cached.append(prompt.cached("replica 0"))
        return prompt

    def make(seed: int, received: bool) -> SimulatedServer:
        return SimulatedServer(LIMITS, COSTS, noise=0.0, seed=seed, received=received)

    fleet = SimulatedFleet(make, 1, known=known)
    fleet.run(asked)
    assert computing == [[], [0], [0, 1], []]
    assert max(cached) < 400 - 8


def test_prefill_servers_keep_decoding_even_and_pay_for_the_transfer() -> None:
    asked = [Arrival(0.02 * i, [*range(100 * i, 100 * i + 90)], 20) for i in range(60)]
    together = serve(asked, 2)[0]
    apart, fleet = serve(asked, 2, prefill=1, late=0.05)
    assert [one.output_tokens for one in apart.records] == [20] * 60
    for one in apart.records:
        assert one.times[1] - one.times[0] >= 0.05
    gaps = {
        name: max(b - a for one in run.records for a, b in zip(one.times[2:], one.times[3:], strict=False))
        for name, run in (("together", together), ("apart", apart))
    }
    assert gaps["apart"] < gaps["together"], "prompts interrupt the decode server"
    assert all(server.scheduler.blocks_used == 0 for server in fleet.servers)
    with pytest.raises(ValueError, match="prefill_replicas: 2 of 2"):
        serve(asked, 2, prefill=2)


def test_unknown_routers_and_dead_links_are_refused() -> None:
    with pytest.raises(ValueError, match="router: 'best' is not one of prefix"):
        policy_named("best")
    with pytest.raises(ValueError, match="link_gb_s: 0 must be above 0"):
        transfer_seconds(1e9, 0)
    assert transfer_seconds(5e9, 50, 0.01) == pytest.approx(0.11)
