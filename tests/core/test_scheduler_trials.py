"""Random lives of a scheduler: every promise is checked after every step (see driver.py)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from quire.cache_kinds import CacheGroup, StateGroup
from quire.core.cache_groups import kv_group
from quire.core.capacity import peak_blocks
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.whole_batches import WholeBatchScheduler
from quire.types import NO_BLOCK, RequestError

from .driver import Driver
from .host_tier import HostTier

BASES = [[1, 2, 3, 4, 5, 6, 7, 8, 9] * 5, [7, 7, 7, 1, 7, 7, 2] * 7, [1, 2, 3, 4, 9, 9] * 8]

POLICIES = ["fcfs", "priority", "sjf", "edf", "lpm", "fair", "priority+lpm", "priority+fair+sjf"]
KINDS = (Scheduler, Scheduler, WholeBatchScheduler)
STATE = -1  # in place of a window: states


def group_of(layer: int, window: int) -> CacheGroup:
    return StateGroup((layer,), 64) if window == STATE else kv_group((layer,), window)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    windows = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 8, 13, STATE]), min_size=1, max_size=3))
    groups = tuple(group_of(g, window) for g, window in enumerate(windows))
    flights = draw(st.integers(1, 2))
    return SchedulerConfig(
        num_blocks=draw(st.integers(len(windows) * 2, 60)),
        block_size=draw(st.sampled_from([1, 2, 3, 4, 8])),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 40)),
        max_model_len=draw(st.integers(4, 60)),
        max_draft_tokens=0 if STATE in windows else draw(st.sampled_from([0, 0, 1, 4, 12])),
        steps_in_flight=flights,
        takes_turns=flights == 2 and draw(st.booleans()),
        groups=groups,
        soft_tokens=True,
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=draw(st.booleans()),
        policy=draw(st.sampled_from(POLICIES)),
    )


# Where a prompt has images, and which.
IMAGES = [((1, 3, "x"),), ((1, 3, "y"),), ((2, 7, "x"),), ((0, 1, "x"), (1, 2, "y"), (4, 5, "x"))]
prompts = st.one_of(
    st.tuples(st.sampled_from(BASES), st.integers(1, 40)).map(lambda t: t[0][: t[1]]),
    st.tuples(st.sampled_from(BASES), st.integers(1, 30), st.lists(st.integers(0, 9), max_size=6)).map(
        lambda t: t[0][: t[1]] + t[2]
    ),
)
asks = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "priority": st.integers(0, 2),
        "namespace": st.sampled_from(["", "", "a"]),
        "tenant": st.sampled_from(["", "a", "b"]),
        "eos": st.sampled_from([(), (3,), (3, 5)]),
        "n": st.sampled_from([1, 1, 2, 4]),
        "max_tokens": st.one_of(st.none(), st.integers(2, 25)),
        "min_tokens": st.integers(0, 2),
        "stop_token_ids": st.sampled_from([(), (7,)]),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "prompt_logprobs_start": st.sampled_from([0, 0, 7, 20]),
        "stepwise": st.booleans(),
        "soft": st.sampled_from([(), (), *IMAGES]),
        "negative": st.one_of(st.just([]), st.just([]), prompts),
    }
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), asks),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("start"), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("finish"), st.tuples(st.integers(0, 9), st.integers(0, 3))),
    ),
    min_size=2,
    max_size=25,
)


def play(driver: Driver, script: list[tuple[str, Any]]) -> None:
    for what, detail in script:
        if what == "add":
            try:
                driver.add(**detail)
            except RequestError as error:
                event(f"refused: {error.field}")
        elif what == "step":
            for _ in range(detail):
                driver.step()
        elif what == "start":
            driver.start()
        elif what == "abort":
            driver.abort(detail)
        else:
            driver.finish(*detail)
    driver.drain()


@settings(max_examples=400)
@given(
    config=configs(),
    script=actions,
    burst=st.sampled_from([1, 1, 3]),
    failing=st.sets(st.integers(0, 9)),
    keeps=st.sampled_from([0, 0, 5, 40]),
    kind=st.sampled_from(KINDS),
    late=st.sampled_from([0.0, 0.0, 0.3]),
)
def test_any_life_keeps_every_promise(
    config: SchedulerConfig,
    script: list[tuple[str, Any]],
    burst: int,
    failing: set[int],
    keeps: int,
    kind: type[Scheduler],
    late: float,
) -> None:
    tier = HostTier(config.block_size, keeps) if keeps and config.enable_prefix_caching else None
    failing = failing if len(failing) < 3 else set()
    driver = Driver(config, burst=burst, failing=frozenset(failing), tier=tier, kind=kind, late=late)
    play(driver, script)
    event(f"preemptions: {min(driver.scheduler.num_preemptions, 3)}")
    event(f"states: {any(isinstance(group, StateGroup) for group in config.groups)}")
    if tier is not None:
        event(f"blocks fetched: {tier.came > 0}")


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_two_steps_in_flight_end_in_the_same_state_as_one(seed: int) -> None:
    event(f"wasted rows: {compare_flights(seed).scheduler.wasted_rows > 0}")


@pytest.mark.scheduling
@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_three_hundred_times_two_steps_in_flight_end_in_the_same_state_as_one(seed: int) -> None:
    event(f"wasted rows: {compare_flights(seed).scheduler.wasted_rows > 0}")


def compare_flights(seed: int) -> Driver:
    """Tokens, reasons and every block that can be found afterwards, where no room has to be made."""
    rng = random.Random(seed)
    config = replace(crowded_config(rng), enable_prefix_caching=True, class_policies=())
    asked = [crowded_ask(rng, config) for _ in range(rng.randint(1, 6))]
    whole = peak_blocks(config.groups, config.max_model_len, config.max_model_len, config.block_size)
    config = replace(config, cache_ttl=None, num_blocks=2 * whole * sum(ask["n"] for ask in asked))
    steps = [rng.randint(0, 3) for _ in asked]
    left = []
    for flights, turns in ((1, False), (2, False), (2, True)):
        driver = Driver(replace(config, steps_in_flight=flights, takes_turns=turns))
        for ask, count in zip(asked, steps, strict=True):
            add(driver, ask)
            for _ in range(count):
                driver.step()
        driver.run_out()
        cached = {key: [block == NO_BLOCK for block in node.value] for key, node in driver.cached().items()}
        made = {key: (sample.tokens, sample.reason) for key, sample in driver.samples.items()}
        left.append((made, cached))
        driver.drain()
    assert left[0] == left[1] == left[2]
    return driver


def crowded_config(rng: random.Random) -> SchedulerConfig:
    """A pool that holds little more than one of the longest sequences, so that nearly everything collides."""
    windows = [rng.choice([0, 0, 2, 4, 7, 12, STATE]) for _ in range(rng.randint(1, 3))]
    windows = rng.choice([windows, windows, [0] * len(windows)])
    groups = tuple(group_of(g, window) for g, window in enumerate(windows))
    size, length, budget = rng.choice([1, 2, 4, 8]), rng.randint(20, 60), rng.randint(4, 80)
    chunked = rng.random() < 0.7
    if not chunked:
        budget = max(budget, length // 2)
    peak = peak_blocks(groups, length, 1 if chunked else length, size)
    flights = rng.randint(1, 2)
    return SchedulerConfig(
        num_blocks=int(peak * rng.uniform(1, 2.5)),
        block_size=size,
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=budget,
        max_model_len=length,
        max_draft_tokens=0 if STATE in windows else rng.choice([0, 0, 3, 20]),
        steps_in_flight=flights,
        takes_turns=flights == 2 and rng.random() < 0.5,
        groups=groups,
        soft_tokens=True,
        enable_prefix_caching=rng.random() < 0.7,
        enable_chunked_prefill=chunked,
        policy=rng.choice(POLICIES),
        class_policies=rng.choice([(), tuple(rng.sample(POLICIES, 2))]),
        copy_partial=not any(windows) and rng.random() < 0.8,
        cache_by_uses=rng.random() < 0.5,
        cache_ttl=rng.choice([None, 3.0, 20.0]),
    )


def crowded_ask(rng: random.Random, config: SchedulerConfig) -> dict[str, Any]:
    longest = config.max_model_len - 2
    if not config.enable_chunked_prefill:
        longest = min(longest, config.max_num_batched_tokens)
    base = rng.choice(BASES)[: rng.randint(1, longest)]
    if rng.random() < 0.4:
        base = base[: rng.randint(1, len(base))] + [rng.randint(0, 9) for _ in range(3)]
    return {
        "prompt": base[:longest],
        "priority": rng.randint(0, 2),
        "namespace": rng.choice(["", "", "a"]),
        "tenant": rng.choice(["", "a", "b"]),
        "service_class": rng.randrange(2) if config.class_policies else 0,
        "eos": rng.choice([(), (3,)]),
        "n": rng.choice([1, 1, 1, 2, 5]),
        "max_tokens": rng.choice([None, 1, rng.randint(1, config.max_model_len - len(base[:longest]))]),
        "prompt_logprobs": rng.choice([None, None, None, 2]),
        "prompt_logprobs_start": 2 * base[0],
        "stepwise": rng.random() < 0.4,
        "negative": rng.choice([[], [], rng.choice(BASES)[: rng.randint(1, longest)]]),
        "soft": [s for s in rng.choice([(), *IMAGES]) if s[0] + s[1] <= len(base[:longest])],
    }


def add(driver: Driver, ask: dict[str, Any]) -> None:
    """Add a request, without its negative prompt where that is refused."""
    try:
        driver.add(**ask)
    except RequestError:
        assert ask["negative"]
        driver.add(**ask | {"negative": []})


def crowded_life(seed: int, **changes: Any) -> Driver:
    rng = random.Random(seed)
    config, kind = crowded_config(rng), rng.choice(KINDS)
    kind = changes.pop("kind", kind)
    config = replace(config, **changes)
    failing = frozenset(rng.sample(range(20), 2)) if rng.random() < 0.3 else frozenset()
    tier = HostTier(config.block_size, rng.randint(5, 60)) if config.enable_prefix_caching else None
    burst = rng.choice([1, 1, 2])
    tier = tier if rng.random() < 0.6 else None
    if tier is not None:
        tier.early = seed % 3 == 0
    late = 0.2 if seed % 4 == 0 else 0.0
    driver = Driver(config, burst=burst, failing=failing, tier=tier, kind=kind, late=late)
    added = 0
    while added < 20:
        for _ in range(rng.choice([0, 0, 1, 1, 3, 8])):
            add(driver, crowded_ask(rng, config))
            added += 1
        for _ in range(rng.randint(1, 5)):
            driver.step()
        if rng.random() < 0.3:
            driver.start()
        if rng.random() < 0.1:
            driver.abort(rng.randint(0, added))
        if rng.random() < 0.1:
            driver.finish(rng.randint(0, added), rng.randint(0, 2))
        if rng.random() < 0.02:
            driver.scheduler.clear_prefix_cache()
    driver.drain()
    return driver


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_a_crowded_life_keeps_every_promise(seed: int) -> None:
    see(crowded_life(seed))


@pytest.mark.scheduling
@settings(max_examples=1000)
@given(seed=st.integers(0, 2**32))
def test_a_thousand_crowded_lives_keep_every_promise(seed: int) -> None:
    see(crowded_life(seed))


def see(driver: Driver) -> None:
    """What the life had, for `--hypothesis-show-statistics`."""
    event(f"states: {any(isinstance(group, StateGroup) for group in driver.config.groups)}")
    event(f"preemptions: {'none' if not driver.scheduler.num_preemptions else 'some'}")
    event(f"wasted rows: {driver.scheduler.wasted_rows > 0}")
    event(f"blocks fetched: {driver.tier is not None and driver.tier.came > 0}")
    event(f"drafts accepted: {driver.worker.accepted_drafts > 0}")
    event(f"branches accepted: {driver.worker.accepted_branches > 0}")
    event(f"evictions or hits: {driver.scheduler.prefix_stats.hit_tokens > 0}")
