"""Floors of tenants in the KV cache: below its floor, a tenant loses no block to another; idle space is lent."""

from __future__ import annotations

import random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from quire.core.block_pool import AuditError
from quire.core.cache_groups import kv_group
from quire.core.capacity import peak_blocks
from quire.core.prefix_cache import PrefixCache, PrefixCaches
from quire.core.scheduler_config import SchedulerConfig
from quire.types import ContextLengthError

from .driver import Driver
from .test_tenants import MINE, cached, flood, run

CONFIG = SchedulerConfig(num_blocks=128, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=1024)


class Watched(PrefixCaches):
    """Fails when a tenant gives up a cached block below its floor for another one."""

    evictions = 0

    def _next_to_give(self, taker: PrefixCache) -> PrefixCache:
        giver = super()._next_to_give(taker)
        assert giver is taker or giver.num_blocks > giver.floor, "a tenant loses a block below its floor"
        Watched.evictions += 1
        return giver


def watched(config: SchedulerConfig, floors: dict[str, int]) -> Driver:
    driver = Driver(config)
    caches = Watched(driver.scheduler._blocks.pool, config.groups, config.block_size)
    driver.scheduler._blocks.caches = caches
    driver.scheduler.set_floors(floors)
    return driver


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_no_tenant_loses_blocks_below_its_floor(seed: int) -> None:
    driver = life(seed)
    event(f"preemptions: {driver.scheduler.num_preemptions > 0}")


def life(seed: int, policy: str = "") -> Driver:
    """Random tenants with random floors; the books are audited after every step, and every answer is checked."""
    rng = random.Random(seed)
    windows = [rng.choice([0, 0, 5, 12]) for _ in range(rng.randint(1, 2))]
    groups = tuple(kv_group((g,), window) for g, window in enumerate(windows))
    size, length = rng.choice([2, 4]), rng.randint(20, 30)
    longest = peak_blocks(groups, length, length, size)
    floors = {name: rng.randint(0, 2 * longest) for name in "abc"[: rng.randint(1, 3)]}
    config = SchedulerConfig(
        num_blocks=sum(floors.values()) + longest + rng.randint(0, 20),
        block_size=size,
        max_num_seqs=rng.randint(1, 12),
        max_num_batched_tokens=rng.randint(8, 80),
        max_model_len=length,
        groups=groups,
        policy=policy or rng.choice(["fcfs", "priority", "fair", "lpm"]),
    )
    driver = watched(config, floors)
    for _ in range(15):
        for _ in range(rng.choice([0, 1, 3])):
            prompt = [rng.randint(0, 2) for _ in range(rng.randint(1, length - 2))]
            params = {
                "n": rng.choice([1, 1, 3]),
                "max_tokens": rng.choice([1, min(5, length - len(prompt)), None]),
            }
            driver.add(prompt, tenant=rng.choice("abcd"), priority=rng.randint(0, 2), **params)
        for _ in range(rng.randint(1, 6)):
            driver.step()
        if rng.random() < 0.2:  # live changes, of which some must wait for a request to end
            driver.scheduler.set_floors({name: rng.randint(0, floor) for name, floor in floors.items()})
        if rng.random() < 0.1:
            driver.abort(rng.randint(0, len(driver.requests)))
    run(driver)
    driver.check_end()
    return driver


def test_a_cache_that_ignores_floors_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCaches, "room_alone", lambda self, cache: self.available)
    monkeypatch.setattr(PrefixCaches, "room", lambda self, cache: self.available)
    with pytest.raises((AssertionError, AuditError)):
        _ = [life(seed) for seed in range(20)]


def test_a_floor_keeps_a_cache_that_an_equal_share_would_not() -> None:
    prompt = [*range(950)]
    for floor, kept in ((0, False), (60, True)):
        driver = watched(CONFIG, {"mine": floor})
        cached(driver, "mine", prompt)
        for index in range(16):
            driver.add([index, *range(250)], tenant="bc"[index % 2], max_tokens=60)
        run(driver)
        assert (cached(driver, "mine", prompt) == 944) is kept


def test_idle_space_is_lent_and_comes_back() -> None:
    driver = watched(CONFIG, {"mine": 100})
    flood(driver, "borrower", together=1, output=1)
    assert driver.scheduler._blocks.caches.of("borrower").num_cached > 120
    cached(driver, "mine")
    assert cached(driver, "mine") == 592
    for _ in range(3):
        flood(driver, "borrower", together=16, output=60)
    assert cached(driver, "mine") == 592
    assert driver.scheduler.blocks_cached > 100


def test_what_cannot_fit_beside_the_floors_is_refused_with_the_numbers() -> None:
    driver = watched(CONFIG, {"mine": 100})
    with pytest.raises(
        ContextLengthError, match="100 of 128 blocks of the KV cache are kept for other tenants"
    ):
        driver.add(MINE, tenant="other", max_tokens=5)
    cached(driver, "mine")
    with pytest.raises(ValueError, match="129 blocks are more than 128"):
        driver.scheduler.set_floors({"a": 129})


def test_a_floor_waits_for_a_request_that_was_admitted_without_it() -> None:
    driver = watched(CONFIG, {})
    driver.add(MINE, tenant="other", max_tokens=50)
    driver.step()
    driver.scheduler.set_floors({"mine": 100})
    assert driver.scheduler.config.floors == {}
    run(driver)
    assert driver.scheduler.config.floors == {"mine": 100}
    driver.check_end()
