"""Every promise of the order under every policy, with thousands of random arrivals on a virtual clock. Each promise has
a small test of its own; this is the whole matrix, behind `make test-scheduling`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.config.schema import POLICIES
from quire.core.cost_model import StepCostModel
from quire.core.policy import Policy
from quire.core.scheduler import Scheduler
from quire.types import Request

from .scheduling import answer, config
from .test_cache_floors import life
from .test_scheduler_trials import crowded_life
from .test_waiting_policies import CROWD, OVERTAKE, requests, shares_by_weight


def asked_of(rng: random.Random, count: int, policy: Policy) -> list[Request]:
    """Requests of two accounts, and three priorities where the policy has them, of which the machine is nearly full."""
    return [
        replace(one, priority=rng.randint(-1, 1) if policy.levels else 0) for one in requests(rng, count, 1.7)
    ]


class Watch:
    """Looks at each step of a scheduler from outside."""

    def __init__(self, asked: list[Request], policy: Policy) -> None:
        self._asked, self._policy = asked, policy
        self._latest: dict[tuple[int, str], float] = {}  # arrival of what started, by priority and account
        self.started: set[str] = set()
        self.made = dict.fromkeys(("prompt", "generated", "seconds"), 0.0)

    def start(self, name: str) -> None:
        """Within a priority, and an account under fair, nobody starts before one who came `OVERTAKE` earlier."""
        request = self._asked[int(name)]
        if name in self.started:  # after a preemption
            return
        self.started.add(name)
        key = request.priority, request.terms.account if self._policy.shares else ""
        latest = self._latest.get(key, float("-inf"))
        assert latest < request.arrival + OVERTAKE
        self._latest[key] = max(latest, request.arrival)
        self.made["prompt"] += len(request.prompt_token_ids)


def lived(policy: str, seed: int, count: int) -> None:
    """A life of `count` arrivals: the bound on overtaking, no idle place while something waits, all tokens of every
    request, and usage that adds up to what was seen."""
    rng, costs, now = random.Random(seed), StepCostModel(), 0.0
    parsed = Policy.parse(policy, OVERTAKE)
    asked = asked_of(rng, count, parsed)
    scheduler = Scheduler(config(policy=policy, **CROWD | {"num_blocks": rng.choice([120, 4000])}))
    watch, books, ended = Watch(asked, parsed), scheduler.usage, dict[str, int]()
    waiting = list(reversed(asked))
    while waiting or scheduler.has_work():
        while waiting and waiting[-1].arrival <= now:
            scheduler.add(waiting.pop())
        out = scheduler.schedule()
        for new in out.new:
            watch.start(new.request_id)
        assert len(out.scheduled) == 4 or out.num_tokens == 24 or not scheduler.num_waiting
        if scheduler.newest is not None and out.scheduled:
            books.weigh(scheduler.newest.rows, scheduler.newest.seqs, costs.weights)
        for event in scheduler.update(out, answer(out, [[7] if row.sample else [] for row in out.scheduled])):
            watch.made["generated"] += len(event.new_token_ids)
            ended[event.request_id] = ended.get(event.request_id, 0) + len(event.new_token_ids)
        if out.scheduled:
            books.ran(1.0)
            watch.made["seconds"] += 1.0
        now += 1.0
    scheduler.audit()
    assert ended == {one.request_id: one.params.max_tokens for one in asked}
    for name, total in watch.made.items():
        found = sum(getattr(line, name) for line in books.lines.values())
        assert found == pytest.approx(total, rel=1e-9), name


@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_life_keeps_them_under_every_policy(policy: str) -> None:
    lived(policy, 0, 150)


@pytest.mark.scheduling
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_life_of_thousands_keeps_them_under_every_policy(policy: str, seed: int) -> None:
    lived(policy, seed, 4000)


@pytest.mark.scheduling
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_each_request_alone(policy: str, seed: int) -> None:
    """In pools that hold little more than one sequence, with all audits after each step."""
    crowded_life(1000 + seed, policy=policy)


@pytest.mark.scheduling
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("policy", POLICIES)
def test_floors_of_tenants_hold(policy: str, seed: int) -> None:
    life(1000 + seed, policy)


@pytest.mark.scheduling
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if "fair" in policy])
def test_weights_are_respected(policy: str, seed: int) -> None:
    shares_by_weight(policy, 100 + seed)
