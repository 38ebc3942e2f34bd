"""A second step scheduled while the first runs, and what it gives: to the last bit what one at a time gives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from helpers.backends import BACKENDS, Backend

from .running import VOCAB, Key, Rig, check_same, requests


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_two_steps_in_flight_give_the_bits_of_one(backend: Backend) -> None:
    asked = requests(10, stop_token_ids=range(0, VOCAB, 16))
    expected = Rig(backend).run(asked)
    overlapped = Rig(backend, steps_in_flight=2)
    check_same(overlapped.run(asked), expected, backend)
    assert overlapped.scheduler.wasted_rows > 0, "no request stopped while a row of it was in flight"


def test_rows_with_drafts_sit_out_while_others_run() -> None:
    asked = [replace(one, stepwise=number % 2 == 0) for number, one in enumerate(requests(10))]
    expected = Rig().run(asked)
    rng = random.Random(1)

    def propose(sample: Key, outputs: int) -> list[int]:
        return expected[sample].tokens[outputs:][: rng.randint(0, 5)] if int(sample[0]) % 2 == 0 else []

    overlapped = Rig(propose=propose, steps_in_flight=2, max_draft_tokens=9)
    check_same(overlapped.run(asked), expected)
    assert overlapped.accepted > 20


def test_sequences_take_turns() -> None:
    """Drafts and grammars need no turn of their own: a sequence that samples is in one step in flight."""
    asked = requests(10, stop_token_ids=range(0, VOCAB, 16))
    expected = Rig().run(asked)
    rng = random.Random(2)

    def propose(sample: Key, outputs: int) -> list[int]:
        return expected[sample].tokens[outputs:][: rng.randint(0, 5)] if int(sample[0]) % 2 == 0 else []

    turns = {"steps_in_flight": 2, "takes_turns": True}
    alternating = Rig(**turns)  # type: ignore[arg-type]
    check_same(alternating.run(asked), expected)
    assert alternating.scheduler.wasted_rows == 0
    drafting = Rig(propose=propose, max_draft_tokens=9, **turns)  # type: ignore[arg-type]
    check_same(drafting.run(asked), expected)
    assert drafting.accepted > 20
