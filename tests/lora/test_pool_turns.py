"""Which adapters are in the pool: the least recently used make room, and every adapter that is waited for comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.lora.pool_turns import PoolTurns


def come(turns: PoolTurns, key: str, pages: int = 1) -> bool:
    """A request asks: whether it is in its adapter now."""
    return turns.enter(key) if turns.slot_of(key) is not None else turns.claim(key, pages) is not None


def of(count: int) -> PoolTurns:
    """A pool for so many adapters of a page each."""
    return PoolTurns(count, count, count)


def test_the_least_recently_used_adapter_makes_room() -> None:
    turns = of(2)
    assert turns.claim("a", 1) == (0, [])
    assert turns.claim("b", 1) == (1, [])
    turns.leave("b")
    turns.leave("a")
    assert turns.enter("b")
    turns.leave("b")
    assert turns.claim("c", 1) == (0, [("a", 0)])
    assert turns.slot_of("a") is None


def test_a_large_adapter_takes_the_room_of_several_and_a_small_one_of_none() -> None:
    turns = PoolTurns(4, 8, 8)
    for key in "abcd":
        assert turns.claim(key, 2)
        turns.leave(key)
    assert (
        turns.claim("large", 5) == (0, [("a", 0), ("b", 1), ("c", 2)]) or turns.slot_of("large") is not None
    )
    assert turns.used_pages == 7
    claimed = turns.claim("small", 1)
    assert claimed is not None
    assert claimed[1] == []
    assert turns.slot_of("d") is not None


def test_more_adapters_rest_in_the_pool_than_may_be_in_use() -> None:
    turns = PoolTurns(2, 8, 8)
    for key in "abcdef":
        assert come(turns, key)
        turns.leave(key)
    assert come(turns, "a")
    assert come(turns, "f")
    assert not come(turns, "c"), "a third would be in use"
    assert turns.slot_of("c") is not None
    assert not come(turns, "a"), "a later request would keep c waiting"
    turns.leave("a")
    turns.begin_round()
    assert come(turns, "c")


def test_a_waiting_adapter_is_promised_room_and_holds_up_no_other() -> None:
    turns = of(2)
    assert come(turns, "a")
    assert come(turns, "b")
    assert not come(turns, "c")  # a is drained
    assert not come(turns, "a"), "a later request would keep c waiting"
    assert come(turns, "b")
    turns.leave("a")
    assert turns.claim("c", 1) == (0, [("a", 0)])


def test_a_younger_small_adapter_does_not_take_what_an_older_large_one_waits_for() -> None:
    turns = PoolTurns(4, 8, 4)
    assert come(turns, "a", 2)
    assert come(turns, "b", 1)
    for _ in range(3):
        turns.begin_round()
        assert not come(turns, "large", 3)
        assert not come(turns, "small", 1), "one page is free, but kept back"
    turns.leave("a")
    turns.begin_round()
    assert come(turns, "large", 3)


def test_a_promise_ends_with_its_request() -> None:
    turns = of(1)
    assert come(turns, "a")
    assert not come(turns, "b")
    turns.begin_round()
    assert come(turns, "a")


def test_a_slot_that_could_not_be_filled_is_empty() -> None:
    turns = of(1)
    assert turns.claim("a", 1) == (0, [])
    turns.drop("a")
    assert turns.claim("b", 1) == (0, [])
    assert turns.used_pages == 1


class Greedy(PoolTurns):
    """Keeps nothing back: whoever fits comes first, and a large adapter may wait for ever."""

    def _has_room(self, key: str, pages: int) -> bool:
        return self._suffices({key: pages}, ())


def test_what_is_kept_back_is_what_refuses_a_younger_one() -> None:
    for kind in (PoolTurns, Greedy):
        turns = kind(4, 8, 4)
        assert come(turns, "a", 3)
        assert not come(turns, "large", 4)
        assert come(turns, "small", 1) is (kind is Greedy)


@given(
    most=st.integers(1, 3),
    pages=st.integers(4, 9),
    asked=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 4)), min_size=1, max_size=30),
)
def test_every_request_runs(most: int, pages: int, asked: list[tuple[str, int]]) -> None:
    """Requests ask in order in every round, run for some rounds and leave; none waits longer than all before it run."""
    turns, sizes = PoolTurns(most, 4, pages), {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4}
    waiting, running, rounds = list(asked), list[list[object]](), 0
    while waiting or running:
        rounds += 1
        assert rounds <= sum(length for _, length in asked) + 2 * len(asked)
        for run in [run for run in running if not run[1]]:
            running.remove(run)
            turns.leave(str(run[0]))
        for run in running:
            run[1] = int(str(run[1])) - 1
        turns.begin_round()
        for request in list(waiting):
            if come(turns, request[0], sizes[request[0]]):
                waiting.remove(request)
                running.append(list(request))
        held = {str(run[0]) for run in running}
        assert len(held) <= most
        assert turns.used_pages <= pages
        slots = [turns.slot_of(key) for key in held]
        assert None not in slots, "a running request lost its adapter"
        assert len(set(slots)) == len(held), "two adapters have one slot"
