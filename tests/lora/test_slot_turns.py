"""Which adapter has which slot: the least recently used makes room, and every adapter that is waited for comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.lora.slot_turns import SlotTurns


def come(turns: SlotTurns, key: str) -> bool:
    """A request asks: whether it is in a slot now."""
    return turns.enter(key) if turns.slot_of(key) is not None else turns.claim(key) is not None


def test_the_least_recently_used_adapter_makes_room() -> None:
    turns = SlotTurns(2)
    assert turns.claim("a") == (0, None)
    assert turns.claim("b") == (1, None)
    turns.leave("b")
    turns.leave("a")
    assert turns.enter("b")
    turns.leave("b")
    assert turns.claim("c") == (0, "a")
    assert turns.slot_of("a") is None


def test_a_waiting_adapter_is_promised_one_slot_and_holds_up_no_other() -> None:
    turns = SlotTurns(2)
    assert come(turns, "a")
    assert come(turns, "b")
    assert not come(turns, "c")  # promised slot 0
    assert not come(turns, "a"), "a later request would keep c waiting"
    assert come(turns, "b")
    turns.leave("a")
    assert turns.claim("c") == (0, "a")


def test_a_promise_ends_with_its_request() -> None:
    turns = SlotTurns(1)
    assert come(turns, "a")
    assert not come(turns, "b")
    turns.begin_round()
    assert come(turns, "a")


def test_a_slot_that_could_not_be_filled_is_empty() -> None:
    turns = SlotTurns(1)
    assert turns.claim("a") == (0, None)
    turns.drop("a")
    assert turns.claim("b") == (0, None)


@given(
    slots=st.integers(1, 3),
    asked=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 4)), min_size=1, max_size=30),
)
def test_every_request_runs(slots: int, asked: list[tuple[str, int]]) -> None:
    """Requests ask in order in every round, run for some rounds and leave; none waits longer than all before it run."""
    turns = SlotTurns(slots)
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
            if come(turns, request[0]):
                waiting.remove(request)
                running.append(list(request))
        held = {str(run[0]) for run in running}
        assert all(turns.slot_of(key) is not None for key in held), "a running request lost its slot"
