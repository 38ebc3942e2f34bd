"""Where grammars begin in an answer, and how a budget closes the thinking."""

from __future__ import annotations

from quire.answers import AnswerRegions
from quire.structured.region_machine import RegionMachine, RegionState

OPEN, CLOSE, CALL = 300, 301, 302


def run(machine: RegionMachine, tokens: list[int]) -> list[RegionState]:
    states = [machine.start()]
    for token in tokens:
        states.append(machine.step(states[-1], token))
    return states


def test_a_grammar_holds_from_the_start_or_behind_the_thinking():
    assert RegionMachine(AnswerRegions()).start().enforced
    states = run(RegionMachine(AnswerRegions(thinking=True, closer=CLOSE)), [1, 2, CLOSE, 3])
    assert [state.enforced for state in states] == [False, False, False, True, True]
    assert [state.runs for state in states] == [0, 0, 0, 1, 1]
    assert states[-1].spent == 2


def test_a_grammar_begins_behind_each_trigger_outside_of_thinking():
    machine = RegionMachine(AnswerRegions(opener=(OPEN,), closer=CLOSE, triggers=(CALL,)))
    states = run(machine, [1, OPEN, CALL, CLOSE, CALL, 5])
    assert [state.enforced for state in states] == [False, False, False, False, False, True, True]
    done = machine.complete(states[-1])
    assert not done.enforced
    assert machine.step(done, CALL).runs == 2
    assert machine.step(done, CALL).enforced


def test_a_single_call():
    machine = RegionMachine(AnswerRegions(triggers=(CALL,), once=True))
    state = machine.complete(run(machine, [CALL])[-1])
    assert state.enforced  # the grammar is at its end, and the answer with it
    assert machine.step(machine.start()._replace(runs=1), CALL).enforced is False


def test_a_budget_closes_the_thinking_with_the_models_own_closer():
    regions = AnswerRegions(opener=(OPEN,), closer=CLOSE, close=(10, CLOSE), budget=2)
    machine = RegionMachine(regions)
    states = run(machine, [OPEN, 1])
    assert machine.forced(states[-1]) == ()
    state = machine.step(states[-1], 2)
    assert machine.forced(state) == (10, CLOSE)
    state = machine.step(state, 10)
    assert machine.forced(state) == (CLOSE,)
    state = machine.step(state, CLOSE)
    assert not state.thinking
    assert machine.forced(state) == ()
    assert machine.forced(RegionMachine(regions).step(machine.start(), OPEN)) == ()
    none = RegionMachine(AnswerRegions(thinking=True, closer=CLOSE, close=(CLOSE,), budget=0))
    assert none.forced(none.start()) == (CLOSE,)


def test_a_character_that_has_begun_is_finished():
    table = {1: b"a", 2: b"\xf0\x9f", 3: b"\x98", 4: b"\x80", 5: "é".encode()}
    regions = AnswerRegions(thinking=True, closer=CLOSE, close=(CLOSE,), budget=2)
    machine = RegionMachine(regions, table.__getitem__)
    states = run(machine, [1, 2, 3, 4])
    assert [machine.forced(state) for state in states[2:]] == [(), (), (CLOSE,)]
    assert machine.forced(run(machine, [1, 5])[-1]) == (CLOSE,)
    endless = run(machine, [1, 2, 2, 2, 2])  # no text: as many tokens as a character may have bytes
    assert [machine.forced(state) for state in endless[4:]] == [(), (CLOSE,)]


def test_a_closer_that_is_spelled_over_tokens():
    table = {1: b"so </th", 2: b"ink>\n\n", 3: b"x"}
    regions = AnswerRegions(thinking=True, closer_bytes=b"</think>", close=(1, 2), budget=9)
    machine = RegionMachine(regions, table.__getitem__)
    states = run(machine, [3, 1, 2, 3])
    assert [state.thinking for state in states] == [True, True, True, False, False]
    assert states[0].enforced  # the grammar itself has the thinking
    assert states[-1].spent == 2


def test_an_opener_of_several_tokens():
    machine = RegionMachine(AnswerRegions(opener=(7, 8, 9), closer=CLOSE, budget=1, close=(CLOSE,)))
    states = run(machine, [7, 7, 8, 9, 1])
    assert [state.thinking for state in states] == [False, False, False, False, True, True]
    assert machine.forced(states[-1]) == (CLOSE,)


def test_thinking_that_comes_first_or_not_at_all():
    """An opener inside of a format is text of it, and has no budget."""
    machine = RegionMachine(
        AnswerRegions(opener=(7, 8), closer=CLOSE, budget=1, close=(CLOSE,), opens_first=True)
    )
    assert [state.thinking for state in run(machine, [7, 8, 1, CLOSE, 7, 8])] == [
        False,
        False,
        True,
        True,
        *[False] * 3,
    ]
    for text in ([1, 7, 8], [7, 7, 8], [8, 7, 8]):
        assert not any(state.thinking for state in run(machine, text))


def test_states_are_values():
    """Drafts are stepped over in copies that are dropped."""
    machine = RegionMachine(AnswerRegions(thinking=True, closer=CLOSE, budget=2, close=(CLOSE,)))
    before = machine.start()
    machine.step(machine.step(before, 1), CLOSE)
    assert before == machine.start()
