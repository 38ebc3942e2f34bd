"""Live changes of a scheduler between steps: nothing is lost, and each takes effect in the next step."""

from __future__ import annotations

import random

import pytest

from quire.config.schema import POLICIES
from quire.core.cache_misses import MissWatch
from quire.core.policy import Policies, Policy
from quire.core.scheduler_config import SchedulerConfig
from quire.core.streams import StepLimits

from .driver import Driver


@pytest.mark.parametrize("seed", range(6))
def test_every_change_in_every_state_keeps_the_promises(seed: int) -> None:
    changed(seed, rounds=40)


@pytest.mark.scheduling
@pytest.mark.parametrize("seed", range(40))
def test_a_thousand_changes(seed: int) -> None:
    changed(100 + seed, rounds=1000)


def changed(seed: int, rounds: int) -> None:
    """Random requests and changes. The driver audits all books after each step, and compares every answer with that of
    the request alone."""
    rng = random.Random(seed)
    config = SchedulerConfig(
        num_blocks=60, block_size=4, max_num_seqs=8, max_num_batched_tokens=40, max_model_len=40
    )
    driver = Driver(config)
    scheduler = driver.scheduler
    for _ in range(rounds):
        for _ in range(rng.choice([0, 1, 2])):
            prompt = [rng.randint(0, 2) for _ in range(rng.randint(1, 20))]
            negative = [1, 2] if rng.random() < 0.2 else ()
            driver.add(
                prompt,
                tenant=rng.choice("ab"),
                negative=negative,
                n=rng.choice([1, 1, 3]),
                max_tokens=rng.randint(1, 8),
                service_class=rng.randrange(2),
            )
        kind = rng.randrange(3)
        if kind == 0:
            name = rng.choice(list(POLICIES))
            by_class = rng.choice([(), tuple(rng.sample(list(POLICIES), 2))])
            scheduler.set_policies(Policies.parse(name, by_class, rng.choice([1.0, 30.0])))
            assert scheduler.config.policy == scheduler.policies.usual.text
            for seq in (*scheduler._requests.waiting, *scheduler.running):
                policy = scheduler.policies.of(seq.state.request)
                if policy.order in {"fcfs", "edf"} and not policy.shares and seq.partner is None:
                    assert seq.rank == policy.rank(seq, scheduler.estimates)
        elif kind == 1:
            scheduler.set_caps(StepLimits(rng.randint(2, 40), rng.randint(2, 8)))
        else:
            scheduler.set_floors({"a": rng.randint(0, 20), "b": rng.randint(0, 20)})
        scheduler.audit()
        running = scheduler.num_running
        driver.step()
        assert scheduler.num_running <= max(running, scheduler.caps.sequences)
    while scheduler.has_work():
        driver.step()
    driver.check_end()


def test_a_cap_beyond_the_start_or_too_small_is_refused_and_changes_nothing() -> None:
    driver = Driver(SchedulerConfig(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=40))
    before = driver.scheduler.caps
    for caps, name in (
        (StepLimits(41, 8), "max_num_batched_tokens"),
        (StepLimits(40, 9), "max_num_seqs"),
        (StepLimits(0, 8), "max_num_batched_tokens"),
        (StepLimits(40, 8, 1), "max_draft_tokens"),
    ):
        with pytest.raises(ValueError, match=name):
            driver.scheduler.set_caps(caps)
    assert driver.scheduler.caps is before


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_written_as_it_was_read(name: str) -> None:
    assert Policy.parse(Policy.parse(name).text) == Policy.parse(name)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_what_looks_at_misses_outlives_a_change_of_policies(policy: str) -> None:
    """The queue that ranks by prefixes goes with its policy; what explains misses still hears of every block."""
    config = SchedulerConfig(
        num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=40, max_model_len=40, policy="lpm"
    )
    driver = Driver(config)
    scheduler = driver.scheduler
    misses = MissWatch(scheduler.caches, config.block_size)
    scheduler.set_policies(Policies.parse(policy, (), 30.0))
    first, other = [1] * 9, [1] * 4 + [2] * 5
    driver.add(first)
    driver.run_out()
    found = misses.look("", "shared:", other, hit=4, usable=8)
    assert found is not None
    assert (found.kind, found.differs_at) == ("differs", 4)
