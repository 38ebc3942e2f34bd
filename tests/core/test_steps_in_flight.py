"""A second step that is scheduled before the result of the first is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.types import NEXT_TOKEN, FinishReason

from .scheduling import answer, ask, make, spans


def test_the_second_step_is_scheduled_while_the_first_runs() -> None:
    scheduler = make(steps_in_flight=2, max_num_batched_tokens=8)
    scheduler.add(ask("a", [1, 2, 3], max_tokens=3))
    scheduler.add(ask("b", list(range(10)), max_tokens=2, arrival=1))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(ValueError, match="step 1 has not been passed to update"):
        scheduler.schedule()
    assert spans(first) == [(0, 0, 3), (1, 0, 5)]
    assert spans(second) == [(0, 3, 4), (1, 5, 10)]
    assert [row.token_ids for row in second.scheduled] == [[NEXT_TOKEN], [5, 6, 7, 8, 9]]
    assert [row.sample for row in second.scheduled] == [True, True]
    with pytest.raises(ValueError, match="step 2 is not the oldest one in flight"):
        scheduler.update(second, answer(second, [[7], [7]]))
    [event] = scheduler.update(first, answer(first, [[7], []]))
    assert event.new_token_ids == [7]
    third = scheduler.schedule()
    assert spans(third) == [(0, 4, 5), (1, 10, 11)]
    assert [row.token_ids for row in third.scheduled] == [[NEXT_TOKEN], [NEXT_TOKEN]]
    scheduler.update(second, answer(second, [[8], [9]]))
    assert not scheduler.schedule().scheduled  # what step 3 samples is the last of both
    events = scheduler.update(third, answer(third, [[6], [6]]))
    assert [event.finish_reason for event in events] == [FinishReason.LENGTH] * 2
    assert not scheduler.has_work()
    assert scheduler.wasted_rows == 0
    scheduler.audit()


def test_a_stop_costs_one_row_in_flight_and_an_abort_two() -> None:
    scheduler = make(steps_in_flight=2)
    scheduler.add(ask("a", [1, 2, 3], max_tokens=9))
    scheduler.add(ask("b", [4, 5, 6], max_tokens=9, arrival=1))
    first, second = scheduler.schedule(), scheduler.schedule()
    [stopped, _] = scheduler.update(first, answer(first, [[0], [7]]))
    assert stopped.finish_reason is FinishReason.STOP
    third = scheduler.schedule()
    assert third.gone == [0]
    assert scheduler.update(second, answer(second, [[7], [7]]))[0].request_id == "b"
    assert scheduler.wasted_rows == 1
    fourth = scheduler.schedule()
    scheduler.abort("b")
    assert scheduler.blocks_used == 0
    assert not scheduler.update(third, answer(third, [[7]]))
    assert not scheduler.update(fourth, answer(fourth, [[7]]))
    assert scheduler.wasted_rows == 3
    scheduler.audit()


def test_a_row_whose_next_input_needs_the_host_sits_a_step_out() -> None:
    scheduler = make(steps_in_flight=2, max_draft_tokens=4)
    scheduler.add(replace(ask("a", [1, 2, 3], max_tokens=9), stepwise=True))
    scheduler.add(ask("b", [4, 5, 6], max_tokens=9, arrival=1))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert spans(second) == [(1, 3, 4)]
    with pytest.raises(ValueError, match="row 1 has drafts or several tokens"):
        scheduler.update(first, replace(answer(first, [[7], [7]]), drafts={1: [8]}))
    with pytest.raises(ValueError, match="row 1 has drafts or several tokens"):
        scheduler.update(first, answer(first, [[7], [7, 8]]))
    scheduler.update(first, replace(answer(first, [[7], [7]]), drafts={0: [8]}))
    third = scheduler.schedule()
    assert [row.token_ids for row in third.scheduled] == [[7, 8], [NEXT_TOKEN]]
    scheduler.update(second, answer(second, [[7]]))
    assert spans(scheduler.schedule()) == [(1, 5, 6)]
