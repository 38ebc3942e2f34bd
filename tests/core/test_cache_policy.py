"""What the prefix cache keeps: LRU, LFU, TTL and pins; and hits that end inside of a block."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from quire.cache_kinds import FullGroup, SlidingGroup
from quire.core.radix import RadixTree
from quire.core.scheduler import Scheduler
from quire.objectives import ServiceTerms
from quire.types import SOFT_DIGEST_BYTES, SoftSpan, TokenIds

from .driver import Driver
from .scheduling import ask, config, make, run


def serve(scheduler: Scheduler, name: str, prompt: list[int], **terms: float) -> int:
    """Run a request alone to its end; the tokens of its prompt that were cached."""
    request = ask(name, prompt, max_tokens=1)
    scheduler.add(replace(request, terms=ServiceTerms(**terms)))  # type: ignore[arg-type]
    cached = 0
    while scheduler.has_work():
        for event in run(scheduler)[1]:
            cached = event.cached_tokens
    scheduler.audit()
    return cached


def timed(scheduler: Scheduler) -> list[float]:
    """The clock of its cache, to be set."""
    now = [0.0]
    caches = scheduler._blocks.caches
    caches.now, caches.clock = 0.0, lambda: now[0]
    return now


def pinned(scheduler: Scheduler) -> int:
    """Blocks that are pinned now."""
    return sum(cache.num_pinned for cache in scheduler._blocks.caches._caches.values())


def prompt(number: int, tokens: int = 9) -> list[int]:
    return [number] * tokens


def test_what_is_used_often_outlives_what_is_used_once() -> None:
    """A prefix used ten times, then a scan of prompts that are used once each: two blocks each, in a pool of ten."""
    found = {}
    for by_uses in (False, True):
        scheduler = make(num_blocks=10, cache_by_uses=by_uses)
        for index in range(10):
            serve(scheduler, f"a{index}", prompt(1))
        for index in range(8):
            serve(scheduler, f"scan{index}", prompt(10 + index))
        found[by_uses] = serve(scheduler, "again", prompt(1))
    assert found == {False: 0, True: 8}


def test_what_was_used_often_long_ago_goes_in_the_end() -> None:
    scheduler = make(num_blocks=10, cache_by_uses=True)
    for index in range(5):
        serve(scheduler, f"a{index}", prompt(1))
    for index in range(40):  # each one is evicted by the next ones, and the age of the cache grows
        serve(scheduler, f"scan{index}", prompt(10 + index))
    assert serve(scheduler, "again", prompt(1)) == 0


def test_unused_prefixes_are_forgotten_after_the_ttl() -> None:
    scheduler = make(cache_ttl=10.0)
    now = timed(scheduler)
    serve(scheduler, "a", prompt(1, 13))
    serve(scheduler, "b", prompt(2, 13))
    now[0] = 9.0
    assert serve(scheduler, "c", prompt(1, 13)) == 12
    now[0] = 11.0
    assert serve(scheduler, "d", prompt(3)) == 0
    assert scheduler.blocks_cached == 3 + 2  # that of a, used at 9, and of d
    assert serve(scheduler, "e", prompt(2, 13)) == 0
    now[0] = 60.0
    serve(scheduler, "f", prompt(4))
    assert scheduler.blocks_cached == 2


def test_a_pinned_prefix_stays_until_its_time_or_until_nothing_else_is_left() -> None:
    scheduler = make(num_blocks=12)
    now = timed(scheduler)
    serve(scheduler, "kept", prompt(1, 13), cache_seconds=100.0)
    assert pinned(scheduler) == 3
    for index in range(12):
        serve(scheduler, f"scan{index}", prompt(10 + index))
    assert serve(scheduler, "again", prompt(1, 13)) == 12
    now[0] = 101.0
    for index in range(12):
        serve(scheduler, f"more{index}", prompt(30 + index))
    assert pinned(scheduler) == 0
    assert serve(scheduler, "later", prompt(1, 13)) == 0
    now[0] = 200.0
    serve(scheduler, "pinned", prompt(1, 13), cache_seconds=100.0)
    serve(scheduler, "large", prompt(2, 45))  # of 12 blocks: it gets them all the same
    assert serve(scheduler, "gone", prompt(1, 13)) == 0


def test_pins_end_at_the_share_of_the_tenant() -> None:
    scheduler = make(num_blocks=20, cache_pin_share=0.25)
    timed(scheduler)
    serve(scheduler, "a", prompt(1, 17), cache_seconds=100.0)
    serve(scheduler, "b", prompt(2, 17), cache_seconds=100.0)
    assert pinned(scheduler) == 5
    assert pinned(make(cache_pin_share=0.0)) == 0


def test_a_pin_outlives_the_ttl() -> None:
    scheduler = make(cache_ttl=10.0)
    now = timed(scheduler)
    serve(scheduler, "a", prompt(1, 13), cache_seconds=50.0)
    now[0] = 30.0
    assert serve(scheduler, "b", prompt(1, 13)) == 12
    now[0] = 90.0
    assert serve(scheduler, "c", prompt(1, 13)) == 0


def test_a_prefix_that_ends_inside_of_a_block_is_copied() -> None:
    scheduler = make(block_size=8, copy_partial=True)
    serve(scheduler, "a", [*range(20)])
    assert serve(scheduler, "b", [*range(14), 99, 98]) == 14
    assert scheduler.prefix_stats.copied_tokens == 6
    assert serve(scheduler, "c", [*range(10), 77, 76, 75]) == 8  # two tokens are not worth a copy
    scheduler.add(ask("d", [*range(14), 55, 54], max_tokens=1))
    out = scheduler.schedule()
    [(source, target)] = out.copies
    assert source != target
    assert out.scheduled[0].start == 14
    with pytest.raises(ValueError, match="copy_partial: needs full attention"):
        config(copy_partial=True, groups=(FullGroup((0,)), SlidingGroup((1,), 8)))


@pytest.mark.parametrize("others", [0, 40])
def test_a_block_with_soft_tokens_is_not_copied(others: int) -> None:
    """Its tokens are placeholders, of equal ids for any image."""
    scheduler = make(block_size=8, copy_partial=True, soft_tokens=True)
    for index in range(others):
        serve(scheduler, f"o{index}", [*range(5), 50 + index, 60, 61, 62])
    soft = (SoftSpan(2, 3, bytes(SOFT_DIGEST_BYTES)),)
    scheduler.add(replace(ask("a", [*range(20)], max_tokens=1), soft_tokens=soft))
    while scheduler.has_work():
        run(scheduler)
    assert serve(scheduler, "b", [*range(7), 99, 98]) == (5 if others else 0)


def brute(prompts: list[list[int]], key: list[int]) -> int:
    """Tokens that the key has in common with some prompt, at most whole blocks of each."""
    best = 0
    for whole in prompts:
        known = whole[: len(whole) // 8 * 8]
        same = next(
            (i for i, (a, b) in enumerate(zip(known, key, strict=False)) if a != b), min(len(known), len(key))
        )
        best = max(best, same)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_match_is_that_of_a_search_through_all_prompts(seed: int) -> None:
    """In tokens, with few and with many children of a block; removed ones and ones with soft tokens among them."""
    rng, tree, known = random.Random(seed), RadixTree[int](32), list[list[int]]()
    for index in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randint(8, 40))]
        if rng.random() < 0.7:
            tree.insert(array("i", tokens).tobytes(), list(range(len(tokens) // 8)))
            known.append(tokens)
        else:
            mark = b"%4d" % index
            soft = tree.extend(tree.root(), array("i", rng.choices([0, 1], k=8)).tobytes() + mark, 0)
            if rng.random() < 0.5:
                tree.remove(soft)
        key = [rng.randrange(2) for _ in range(40)]
        path = tree.match(array("i", key).tobytes())
        found = 8 * len(path)
        at = path[-1] if path else tree.root()
        nearest = tree.nearest(at, array("i", key[found : found + 8]).tobytes())
        found += nearest[1] // 4 if nearest else 0
        assert found == brute(known, key)
        if index % 40 == 39:
            tree.audit()


@pytest.mark.parametrize("seed", range(6))
def test_copies_give_the_tokens_of_a_request_alone(seed: int) -> None:
    """The worker knows which prefix each cell of a block holds, those of copies too."""
    rng = random.Random(seed)
    made = config(
        num_blocks=rng.choice([14, 30, 80]), block_size=8, max_num_seqs=4, max_num_batched_tokens=rng.choice([7, 30]),
        copy_partial=True, steps_in_flight=rng.randint(1, 2), cache_by_uses=rng.random() < 0.5,
    )  # fmt: skip
    driver = Driver(made)
    base = [rng.randrange(9) for _ in range(40)]
    for _ in range(40):
        tokens = base[: rng.randint(1, 40)] + [rng.randrange(9) for _ in range(rng.randint(1, 8))]
        driver.add(tokens, max_tokens=rng.randint(1, 8))
        for _ in range(rng.randint(0, 4)):
            driver.step()
    driver.drain()
    assert driver.worker.copied_tokens > 0


def test_tenants_copy_nothing_from_each_other() -> None:
    scheduler = make(block_size=8, copy_partial=True, max_num_batched_tokens=32)
    for tenant in "ab":
        prompt_ids = TokenIds(range(20))
        scheduler.add(replace(ask(tenant, [], max_tokens=1), tenant=tenant, prompt_token_ids=prompt_ids))
        out, _ = run(scheduler)
        assert not out.copies
        assert out.scheduled[0].start == 0
    assert serve(scheduler, "c", [*range(14), 99, 98]) == 0
