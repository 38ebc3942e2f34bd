"""Policies per class of service, preemptions that gain ground, and what a flood of lower classes costs the first."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.bench.simulated_server import Arrival, SimulatedServer
from quire.bench.statistics import percentile
from quire.bench.timeline import request_metrics
from quire.config.schema import POLICIES, EngineConfig
from quire.core.cached_prefix import Hit
from quire.core.guided_pairs import halves
from quire.core.policy import Policies
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import Sequence, Status
from quire.core.step_plan import StepPlan
from quire.objectives import ServiceClass, ServiceTerms, class_policies, parse_classes
from quire.types import Request

from .driver import Driver
from .scheduling import config
from .test_waiting_policies import CROWD, OVERTAKE, play, requests

COSTS = (0.012, 4e-4, 3e-4, 2e-7, 4e-9, 0.0, 0.0, 0.0)


def classed(rng: random.Random, count: int, gap: float, classes: int) -> list[Request]:
    return [
        replace(one, terms=replace(one.terms, service_class=rng.randrange(classes)))
        for one in requests(rng, count, gap)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_each_class_keeps_the_bound_of_its_policy_and_no_place_stays_free(seed: int) -> None:
    """Within a class, and an account under fair, nothing is overtaken by what arrives `OVERTAKE` later. With as much
    capacity as work, the last class is served too."""
    rng = random.Random(seed)
    orders = [policy for policy in POLICIES if not policy.startswith("priority")]
    chosen = tuple(rng.choice(orders) for _ in range(3))
    asked = classed(rng, 400, 1.8, 3)
    scheduler = Scheduler(config(policy=rng.choice(orders), class_policies=chosen, **CROWD))
    latest: dict[tuple[int, str], float] = {}
    seen: set[str] = set()
    for out in play(scheduler, asked):
        for name in [new.request_id for new in out.new if new.request_id not in seen]:
            request = asked[int(name)]
            number = request.terms.service_class
            key = number, request.terms.account if "fair" in chosen[number] else ""
            assert latest.get(key, float("-inf")) < request.arrival + OVERTAKE
            latest[key] = max(latest.get(key, float("-inf")), request.arrival)
            seen.add(name)
        # Work conservation: a step has all places, all of its budget, or all there is.
        assert len(out.scheduled) == 4 or out.num_tokens == 24 or not scheduler.num_waiting
    assert len(seen) == len(asked)
    scheduler.audit()


def test_a_class_goes_by_its_policy_and_the_others_by_the_usual_one() -> None:
    scheduler = Scheduler(config(policy="fcfs", class_policies=("", "edf"), **CROWD | {"max_num_seqs": 1}))
    base, started = requests(random.Random(0), 1, 1)[0], []
    for index in range(8):
        terms = ServiceTerms(service_class=index % 2, due=20.0 - index)
        scheduler.add(replace(base, request_id=str(index), arrival=float(index), terms=terms))
    for out in play(scheduler, []):
        started += [new.request_id for new in out.new]
    assert started == ["0", "2", "4", "6", "7", "5", "3", "1"]


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_the_same_under_every_policy_of_a_class(seed: int) -> None:
    """The driver compares every sample with the same request alone, and audits each step."""
    rng = random.Random(seed)
    chosen = tuple(rng.choice(POLICIES) for _ in range(2))
    driver = Driver(config(num_blocks=24, max_num_seqs=5, max_num_batched_tokens=12, class_policies=chosen))
    for _ in range(25):
        prompt = [rng.randint(0, 9) for _ in range(rng.randint(1, 24))]
        driver.add(
            prompt, max_tokens=rng.randint(1, 16), service_class=rng.randrange(2), priority=rng.randint(0, 2)
        )
        for _ in range(rng.randint(0, 2)):
            driver.step()
    driver.drain()


class Watched(Scheduler):
    """Counts preemptions of sequences that have not got further than at the one before."""

    in_vain = 0

    def _preempt(self, victim: Sequence, step: StepPlan) -> None:
        pair = halves(victim, Status.RUNNING)
        self.in_vain += any(half.preemptions and half.computed <= half.reached for half in pair)
        super()._preempt(victim, step)


class Unguarded(Watched):
    def _start(self, seq: Sequence, hit: Hit, step: StepPlan) -> None:
        super()._start(seq, hit, step)
        self._resumed.clear()


def crowd(seed: int, kind: type[Watched]) -> tuple[int, int]:
    """Preemptions of a life in a pool that holds a fraction of what runs, and those in vain."""
    rng = random.Random(seed)
    made = config(
        num_blocks=rng.randint(18, 40), max_num_seqs=rng.randint(3, 8), max_num_batched_tokens=rng.randint(3, 9),
        enable_prefix_caching=rng.random() < 0.5, policy=rng.choice(POLICIES), class_policies=("", "edf", "sjf"),
    )  # fmt: skip
    driver = Driver(made, kind=kind)
    for _ in range(40):
        prompt = [rng.randint(0, 9) for _ in range(rng.randint(1, 40))]
        most = rng.randint(1, 63 - len(prompt))
        driver.add(prompt, max_tokens=most, service_class=rng.randrange(3), priority=rng.randint(0, 2))
        for _ in range(rng.randint(0, 6)):
            driver.step()
    driver.drain()
    assert isinstance(driver.scheduler, Watched)
    return driver.scheduler.num_preemptions, driver.scheduler.in_vain


def test_a_preempted_sequence_gets_further_before_it_is_preempted_again() -> None:
    found = [crowd(seed, Watched) for seed in range(10)]
    assert sum(preempted for preempted, _ in found) > 100
    assert sum(vain for _, vain in found) == 0


def test_without_the_guard_sequences_are_preempted_in_vain() -> None:
    assert sum(crowd(seed, Unguarded)[1] for seed in range(10)) > 0


@pytest.mark.scheduling
@pytest.mark.parametrize("seed", range(100, 300))
def test_preemptions_gain_ground_in_many_lives(seed: int) -> None:
    assert crowd(seed, Watched)[1] == 0


def flood(count: int, rate: float, seed: int, service_class: int) -> list[Arrival]:
    rng, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        prompt = [rng.randrange(5000) for _ in range(rng.randint(20, 400))]
        made.append(Arrival(at, prompt, rng.randint(5, 60), service_class))
    return made


@pytest.mark.parametrize("policy", ["fcfs", "fair+edf"])
def test_a_flood_of_the_last_class_delays_the_first_by_two_steps_at_most(policy: str) -> None:
    """p99 of the TTFT: the step that runs when a request comes, and what streams take of the steps of its prompt."""
    limits = SchedulerConfig(
        num_blocks=3000, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=2048, policy=policy
    )
    classes = [ServiceClass("interactive"), ServiceClass("batch")]
    urgent = flood(150, 2.0, 1, 0)

    def first(arrivals: list[Arrival]) -> float:
        run = SimulatedServer(limits, COSTS, classes).run(arrivals)
        return percentile([request_metrics(one).ttft or 0.0 for one in run.records[: len(urgent)]], 99)

    alone = first(urgent)
    beside = first([*urgent, *flood(1500, 20.0, 2, 1)])
    step = 0.012 + 512 * 3e-4 + 32 * 4e-4 + 32 * 500 * 2e-7 + 512 * 512 * 4e-9  # the longest there is
    assert beside < alone + 2 * step
    if policy == "fcfs":  # a negative control: in one class they wait for the flood
        plain = SimulatedServer(limits, COSTS, [ServiceClass("all")])
        mixed = [replace(one, service_class=0) for one in [*urgent, *flood(1500, 20.0, 2, 1)]]
        records = plain.run(mixed).records[: len(urgent)]
        assert percentile([request_metrics(one).ttft or 0.0 for one in records], 99) > alone + 20 * step


def test_whether_some_policy_goes_by_priorities() -> None:
    assert not Policies.parse("fair+edf", ("", "sjf")).levels
    assert Policies.parse("edf", ("", "priority+sjf")).levels
    assert Policies.parse("priority", ("edf",)).levels


def test_the_option_takes_a_policy_for_each_class() -> None:
    classes = parse_classes(["chat:ttft=500", "batch:"])
    assert class_policies("fair", classes, POLICIES) == ("fair", ())
    assert class_policies("edf,batch=sjf", classes, POLICIES) == ("edf", ("", "sjf"))
    asked = EngineConfig().replace(slo=("chat:", "batch:"), scheduling_policy="fair+edf,batch=priority+sjf")
    assert asked.scheduler.scheduling_policy == "fair+edf,batch=priority+sjf"
    for wrong, why in (
        ("lifo", "'lifo' is not one of fcfs"), ("edf,gold=sjf", "'gold' is not a class of slo: chat, batch"),
        ("edf,batch=", "'' is not one of"), ("edf,batch=sjf,batch=lpm", "batch is given twice"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"scheduling_policy: {why}"):
            EngineConfig().replace(slo=("chat:", "batch:"), scheduling_policy=wrong)
