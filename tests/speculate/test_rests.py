"""Looking for drafts takes its share of the time and no more, and drafts that slow steps down are left alone."""

from __future__ import annotations

import random

import pytest

from quire.speculate.rests import LOOKS, Rests


def waits(rests: Rests, most: int = 5000) -> int:
    """Steps until the next look is due."""
    return next(step for step in range(1, most) if rests.step())


def test_looks_that_find_nothing_take_their_share_of_the_time() -> None:
    rests, looks, steps = Rests(), 0, 0
    while steps < 20_000:
        steps += waits(rests)
        rests.looked(0.3, 1.0)  # a third of a step
        looks += 1
    assert looks * 0.3 == pytest.approx(LOOKS * steps, rel=0.1)


def test_a_look_that_costs_nothing_beside_a_step_is_made_after_each() -> None:
    rests = Rests()
    for _ in range(100):
        assert waits(rests) == 1
        rests.looked(2e-6, 1e-2)


def test_a_look_that_waited_for_a_processor_counts_as_the_others() -> None:
    rests = Rests()
    for _ in range(3):
        rests.looked(1e-4, 1e-2)
    waits(rests)
    rests.looked(1.0, 1e-2)
    assert waits(rests) <= 2


def test_what_begins_is_seen_at_once_unless_such_looks_were_vain() -> None:
    rests = Rests()
    rests.looked(0.3, 1.0)
    assert not rests.step()
    assert rests.may_look()
    for _ in range(5):
        rests.looked(0.3, 1.0)
    assert not rests.may_look()
    rests.won(3.0)  # it was worth it
    assert rests.may_look()


def test_drafts_that_lose_rest_ever_longer_until_they_win() -> None:
    rests, lengths = Rests(), list[int]()
    for _ in range(6):
        while not rests.won(-0.4):
            pass
        assert rests.resting
        assert not rests.may_look()
        lengths.append(waits(rests))
    assert lengths == sorted(lengths)
    assert lengths[-1] > 4 * lengths[0]
    for _ in range(20):
        assert not rests.won(1.0)
    while not rests.won(-0.4):
        pass
    assert waits(rests) == lengths[0]


def test_drafts_that_win_on_the_whole_go_on() -> None:
    """One accident is no loss, and neither is a series of wrong drafts after many right ones."""
    rng, rests = random.Random(0), Rests()
    began = sum(rests.won(rng.choice((-0.4, -0.3, 0.6, 1.2))) for _ in range(2000))
    assert began == 0
    assert not rests.won(-100.0)


def test_something_new_ends_a_rest() -> None:
    rests = Rests()
    while not rests.won(-1.0):
        pass
    rests.end()
    assert rests.may_look()
    assert waits(rests) == 1
