from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.block_pool import CACHED, FREE, AuditError, BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_held, pool.num_cached


def test_a_block_goes_free_held_cached_held_free() -> None:
    pool = BlockPool(4)
    assert counts(pool) == (4, 0, 0)
    [block] = pool.take(1)
    assert counts(pool) == (3, 1, 0)
    pool.publish(block)
    assert pool.release([block]) == [block]
    assert counts(pool) == (3, 0, 1)
    assert pool.is_cached(block)
    pool.hold([block])
    pool.hold([block])
    assert counts(pool) == (3, 1, 0)
    assert pool.release([block]) == []
    pool.unpublish(block)
    assert counts(pool) == (3, 1, 0)
    assert pool.release([block]) == []
    assert counts(pool) == (4, 0, 0)
    pool.audit([], [])


def test_withdrawing_a_cached_block_frees_it() -> None:
    pool = BlockPool(1)
    pool.take(1)
    pool.publish(0)
    pool.release([0])
    pool.unpublish(0)
    assert counts(pool) == (1, 0, 0)


def test_every_block_is_handed_out_once() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(2) + pool.take(0) + pool.take(3)) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="1 blocks requested, 0 of 5 are free"):
        pool.take(1)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.release([0]), "but not held"),
        (lambda pool: pool.hold([0]), "free and cannot be shared"),
        (lambda pool: pool.publish(0), "not held"),
        (lambda pool: pool.unpublish(0), "not published"),
        (lambda pool: BlockPool(0), "num_blocks"),
    ],
)
def test_misuse_is_refused(misuse: Callable[[BlockPool], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        misuse(BlockPool(2))


def corrupt_free_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def corrupt_lost(pool: BlockPool) -> None:
    pool._free.pop()


def corrupt_free_and_held(pool: BlockPool) -> None:
    pool._references[pool._free[0]] = 1


def corrupt_negative(pool: BlockPool) -> None:
    pool._references[pool._free[0]] = -1


def corrupt_count(pool: BlockPool) -> None:
    pool.num_cached += 1


def corrupt_flag(pool: BlockPool) -> None:
    pool._published[pool.take(1)[0]] = 1


def corrupt_reference(pool: BlockPool) -> None:
    pool.hold(pool.take(1))


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupt_free_twice,
        corrupt_lost,
        corrupt_free_and_held,
        corrupt_negative,
        corrupt_count,
        corrupt_flag,
        corrupt_reference,
    ],
)
def test_the_audit_sees_every_kind_of_corruption(corrupt: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(6)
    held, known = pool.take(2)
    pool.publish(known)
    pool.audit([[held], [known]], [known])
    corrupt(pool)
    with pytest.raises(AuditError):
        pool.audit([[held], [known]], [known])


def test_the_audit_sees_tables_and_caches_that_disagree() -> None:
    pool = BlockPool(3)
    held, known = pool.take(2)
    pool.publish(known)
    for tables, published in (
        ([[held]], [known]),
        ([[held, held], [known]], [known]),
        ([[held], [known], [7]], [known]),
        ([[held], [known]], []),
        ([[held], [known]], [known, known]),
        ([[held], [known]], [held, known]),
    ):
        with pytest.raises(AuditError):
            pool.audit(tables, published)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60))
def test_any_legal_use_keeps_the_books(moves: list[tuple[int, int]]) -> None:
    pool, tables, published = BlockPool(8), [[0][:0]], set[int]()
    for move, which in moves:
        table = tables[which % len(tables)]
        if move == 0 and pool.num_free >= which:
            tables.append(pool.take(which))
        elif move == 1 and table:
            pool.hold(table)
            tables.append(list(table))
        elif move == 2:
            pool.release(table)
            tables.remove(table)
            tables = tables or [[]]
        elif move == 3:
            fresh = [block for block in table if block not in published][:1]
            for block in fresh:
                pool.publish(block)
            published.update(fresh)
        elif move == 4 and published:
            block = sorted(published)[which % len(published)]
            pool.unpublish(block)
            published.discard(block)
        pool.audit(tables, published)


def test_states_of_blocks_can_be_looked_at() -> None:
    pool = BlockPool(8)
    first, second, third, fourth = pool.take(4)
    pool.hold([second])
    pool.publish(third)
    pool.release([third, fourth])
    states = pool.states(1)
    assert [states[block] for block in (first, second, third, fourth)] == [1, 2, CACHED, FREE]
    assert pool.states(2) == states[::2]
    reached = BlockPool(8)
    reached.reach = lambda _: None
    assert reached.states(1) == []
    reached.take(3)
    assert reached.states(1) == [1, 1, 1]
