"""Drafts change what a step computes and never what a request gets, to the last bit of its logprobs."""

from __future__ import annotations

import random

import pytest

from helpers.backends import BACKENDS, Backend

from .running import VOCAB, Key, Rig, check_same, requests


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_with_right_and_wrong_drafts_every_bit_is_that_without(backend: Backend) -> None:
    asked = requests(10)
    expected = Rig(backend).run(asked)
    rng = random.Random(1)

    def propose(sample: Key, outputs: int) -> list[int]:
        after = expected[sample].tokens[outputs:][: rng.randint(0, 5)]
        return [token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in after]

    drafting = Rig(backend, propose, max_draft_tokens=9)
    found = drafting.run(asked)
    check_same(found, expected, backend)
    assert 20 < drafting.accepted < drafting.drafts
