from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache_kinds import CacheGroup, FullGroup, SlidingGroup, StateGroup
from quire.core.block_pool import AuditError, BlockPool
from quire.core.cached_prefix import BlockNode
from quire.core.prefix_cache import PrefixCache, PrefixCaches
from quire.types import NO_BLOCK

FULL = (FullGroup((0,)),)
STATES = (FullGroup((0,)), StateGroup((1,), 64))
HYBRID = (FullGroup((0,)), SlidingGroup((1,), 5))
SLIDING = (SlidingGroup((0,), 5),)
SIZE = 2


def key(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


class Run:
    """A sequence reduced to what the cache sees of it: it computes `tokens` (whole blocks) and publishes."""

    def __init__(self, cache: PrefixCache, groups: int, tokens: list[int], *, use_hits: bool = True) -> None:
        self.cache = cache
        cache.enter()
        hit = cache.match(key(tokens), len(tokens) - 1 if use_hits else 0)
        self.node: BlockNode = cache.acquire(hit)
        self.hit = hit.length
        self.tables = [list(blocks) for blocks in hit.blocks]
        for start in range(hit.length, len(tokens), SIZE):
            for table, block in zip(self.tables, cache.allocate(groups), strict=True):
                table.append(block)
            block_key = key(tokens[start : start + SIZE])
            self.node = cache.publish(self.node, block_key, [table[-1] for table in self.tables])

    def live(self) -> list[int]:
        return [block for table in self.tables for block in table if block != NO_BLOCK]

    def give_back(self, group: int, count: int) -> None:
        """The first `count` blocks of a group leave its window."""
        self.cache.release(self.tables[group][:count])
        self.tables[group][:count] = [NO_BLOCK] * count

    def end(self) -> None:
        self.cache.release_all(self.node, self.live())
        self.cache.exit()


def make(groups: tuple[CacheGroup, ...], blocks: int) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(blocks)
    return pool, PrefixCaches(pool, groups, SIZE).of()


def check(cache: PrefixCache, *running: Run) -> None:
    cache._caches.audit([("", run.live(), run.node) for run in running])


def available(cache: PrefixCache) -> int:
    return cache._caches.available


def hit_length(cache: PrefixCache, tokens: list[int], namespace: str = "") -> int:
    return cache.match(key(tokens), len(tokens), namespace).length


def test_a_finished_prefix_is_found_again() -> None:
    pool, cache = make(FULL, 8)
    first = Run(cache, 1, [1, 2, 3, 4, 5, 6])
    check(cache, first)
    first.end()
    check(cache)
    assert (pool.num_free, pool.num_cached, available(cache)) == (5, 3, 8)
    second = Run(cache, 1, [1, 2, 3, 4, 9, 9])
    assert second.hit == 4
    assert second.tables[0][:2] == first.tables[0][:2]
    check(cache, second)


def test_the_last_token_and_partial_blocks_are_never_hit() -> None:
    _, cache = make(FULL, 8)
    Run(cache, 1, [1, 2, 3, 4]).end()
    for most, found in ((4, 4), (3, 2), (2, 2), (1, 0), (0, 0)):
        assert cache.match(key([1, 2, 3, 4]), most).length == found


def test_namespaces_never_share() -> None:
    _, cache = make(FULL, 8)
    Run(cache, 1, [1, 2]).end()
    assert hit_length(cache, [1, 2]) == 2
    assert hit_length(cache, [1, 2], "other") == 0
    cache.forget_namespace("")
    check(cache)
    assert hit_length(cache, [1, 2]) == 0
    assert available(cache) == 8


def test_a_sliding_group_takes_only_its_window_and_limits_the_hit() -> None:
    _, cache = make(HYBRID, 40)
    tokens = list(range(16))
    run = Run(cache, 2, tokens)
    run.give_back(1, 5)
    check(cache, run)
    hit = cache.match(key(tokens), 16)
    assert hit.length == 16
    assert hit.blocks[0] == run.tables[0]
    assert hit.blocks[1] == [NO_BLOCK] * 6 + run.tables[1][6:]  # position 16 reads 12 … 15 behind it
    # Lose the sliding block of tokens 8, 9: hits at 10, 12 need it, those at 14 and 16 do not, nor at 8.
    lost = hit_blocks(cache, tokens, 1)[4]
    cache._unpublish(lost)
    assert [hit_length(cache, tokens[:end]) for end in range(2, 17, 2)] == [2, 4, 6, 8, 8, 8, 14, 16]
    run.end()
    check(cache)


def test_a_prefix_is_hit_only_where_a_state_was_kept() -> None:
    _, cache = make(STATES, 40)
    tokens = list(range(10))
    run = Run(cache, 2, tokens)
    run.give_back(1, 4)
    check(cache, run)
    hit = cache.match(key(tokens), 10)
    assert hit.length == 10
    assert hit.blocks[1] == [NO_BLOCK] * 4 + run.tables[1][4:]  # the states after the prefix, no others
    for index in (1, 3):
        cache._unpublish(hit_blocks(cache, tokens, 1)[index])
    assert [hit_length(cache, tokens[:end]) for end in range(2, 11, 2)] == [2, 2, 6, 6, 10]
    run.end()
    check(cache)


def hit_blocks(cache: PrefixCache, tokens: list[int], group: int) -> list[int]:
    return [node.value[group] for node in cache._tree.match(key(tokens))]


def test_eviction_takes_the_oldest_sliding_block_anywhere_and_full_ones_leaf_first() -> None:
    pool, cache = make(HYBRID, 12)
    run = Run(cache, 2, list(range(12)))
    assert pool.num_free == 0
    run.give_back(1, 3)
    run.end()
    sliding = list(hit_blocks(cache, list(range(12)), 1))
    cache.allocate(3)  # first what left the window while running, although its nodes are not leaves
    assert hit_blocks(cache, list(range(12)), 1) == [NO_BLOCK] * 3 + sliding[3:]
    assert hit_length(cache, list(range(12))) == 12
    cache.allocate(2)  # then the deepest node, with all its blocks
    assert len(hit_blocks(cache, list(range(12)), 0)) == 5


def test_least_recently_used_goes_first_across_namespaces() -> None:
    _, cache = make(FULL, 6)
    Run(cache, 1, [1, 1, 2, 2, 3, 3]).end()
    Run(cache, 1, [8, 8, 9, 9, 7, 7]).end()
    Run(cache, 1, [1, 1, 2, 2, 3, 3]).end()
    cache.allocate(2)
    assert (hit_length(cache, [1, 1, 2, 2, 3, 3]), hit_length(cache, [8, 8, 9, 9, 7, 7])) == (6, 2)


def test_with_sliding_groups_only_empty_nodes_vanish() -> None:
    pool, cache = make(SLIDING, 4)
    run = Run(cache, 1, [1, 2, 3, 4, 5, 6, 7, 8])
    run.give_back(0, 2)
    cache.allocate(2)
    assert len(cache._tree) == 4  # still the way to what the sequence publishes
    assert available(cache) == 0
    run.end()
    cache.clear()
    assert (len(cache._tree), pool.num_cached, pool.num_free) == (0, 0, 2)
    cache._tree.audit()


def test_a_second_computation_keeps_its_own_block_until_the_first_is_given_up() -> None:
    pool, cache = make(FULL, 9)
    runs = [Run(cache, 1, [1, 2, 3, 4], use_hits=False) for _ in range(3)]
    check(cache, *runs)
    assert pool.num_held == 6
    assert hit_blocks(cache, [1, 2, 3, 4], 0) == runs[0].tables[0]
    runs[0].end()  # its blocks are useless now: a twin is held anyway
    check(cache, *runs[1:])
    assert pool.num_cached == 0
    assert hit_blocks(cache, [1, 2, 3, 4], 0) == runs[1].tables[0]
    runs[2].end()
    check(cache, runs[1])
    runs[1].end()
    check(cache)
    assert (pool.num_cached, pool.num_free) == (2, 7)


def test_a_second_computation_replaces_unheld_blocks() -> None:
    pool, cache = make(FULL, 4)
    Run(cache, 1, [1, 2, 3, 4]).end()
    again = Run(cache, 1, [1, 2, 3, 4], use_hits=False)
    check(cache, again)
    assert (pool.num_cached, pool.num_held, pool.num_free) == (0, 2, 2)
    assert hit_blocks(cache, [1, 2, 3, 4], 0) == again.tables[0]


def test_a_second_computation_replaces_evicted_blocks() -> None:
    _, cache = make(HYBRID, 20)
    run = Run(cache, 2, list(range(8)))
    run.give_back(1, 2)
    for block in list(cache._idle):
        cache._unpublish(block)
    cache.allocate(0)
    other = Run(cache, 2, list(range(8)), use_hits=False)
    check(cache, run, other)
    assert hit_blocks(cache, list(range(8)), 1) == other.tables[1][:2] + run.tables[1][2:]
    for each in (run, other):
        each.end()
    check(cache)


def test_discard_forgets_a_damaged_prefix_but_nothing_others_use() -> None:
    pool, cache = make(FULL, 9)
    other = Run(cache, 1, [1, 2, 3, 4])
    bad = Run(cache, 1, [1, 2, 5, 6, 7, 8])
    bad.end()
    cache.forget(bad.node)
    check(cache, other)
    assert (pool.num_cached, hit_length(cache, [1, 2, 5, 6])) == (0, 2)
    other.end()
    check(cache)


def test_allocating_more_than_available_is_refused() -> None:
    _, cache = make(FULL, 3)
    run = Run(cache, 1, [1, 2])
    with pytest.raises(ValueError, match="3 blocks requested, 2 are available"):
        cache.allocate(3)
    with pytest.raises(ValueError, match="in use"):
        cache.forget_namespace("")
    run.end()
    assert len(cache.allocate(3)) == 3


def forget_home(cache: PrefixCache, run: Run) -> None:
    del cache._home[run.tables[0][0]]


def extra_home(cache: PrefixCache, run: Run) -> None:
    cache._home[30] = (run.node, 0)


def wrong_block(cache: PrefixCache, run: Run) -> None:
    run.node.value[0], run.node.value[1] = run.node.value[1], run.node.value[0]


def missing_full_block(cache: PrefixCache, run: Run) -> None:
    run.node.value[0] = NO_BLOCK


def extra_lock(cache: PrefixCache, run: Run) -> None:
    run.node.locks += 1


def forgotten_idle(cache: PrefixCache, run: Run) -> None:
    cache._idle.popitem()


def strange_twin(cache: PrefixCache, run: Run) -> None:
    cache._twin_of[30] = run.tables[0][0]


def lost_tree_count(cache: PrefixCache, run: Run) -> None:
    cache._tree._size += 1


def stuck_twin(cache: PrefixCache, run: Run) -> None:
    idle = next(iter(cache._idle))
    cache._twins[idle] = [30]
    cache._twin_of[30] = idle


@pytest.mark.parametrize(
    "corrupt",
    [
        forget_home,
        extra_home,
        wrong_block,
        missing_full_block,
        extra_lock,
        forgotten_idle,
        strange_twin,
        lost_tree_count,
        stuck_twin,
    ],
)
def test_the_audit_sees_corruption(corrupt: Callable[[PrefixCache, Run], None]) -> None:
    _, cache = make(HYBRID, 40)
    run = Run(cache, 2, list(range(8)))
    run.give_back(1, 1)
    check(cache, run)
    corrupt(cache, run)
    with pytest.raises(AuditError):
        check(cache, run)


@settings(max_examples=150)
@given(
    groups=st.sampled_from([FULL, HYBRID, SLIDING]),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "cold", "end", "behind"]),
            st.integers(0, 5),
            st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5),
        ),
        max_size=30,
    ),
)
def test_whatever_is_not_held_can_be_allocated(
    groups: tuple[CacheGroup, ...], moves: list[tuple[str, int, list[int]]]
) -> None:
    pool, cache = make(groups, 14)
    running: list[Run] = []
    for move, which, units in moves:
        tokens = [token for token in units for _ in range(SIZE)]
        run = running[which % len(running)] if running else None
        if move in {"start", "cold"} and available(cache) >= len(units) * len(groups):
            running.append(Run(cache, len(groups), tokens, use_hits=move == "start"))
        elif move == "end" and run:
            running.remove(run)
            run.end()
        elif move == "behind" and run and groups[-1].window:
            table = run.tables[-1]
            dead = sum(block == NO_BLOCK for block in table)
            if len(table) > dead:
                cache.release(table[dead : dead + 1])
                table[dead] = NO_BLOCK
        check(cache, *running)
        assert available(cache) == pool.num_blocks - pool.num_held
    cache.enter()
    rest = cache.allocate(available(cache))
    cache._caches.audit([("", rest, None), *(("", run.live(), run.node) for run in running)])
