"""Bitmasks of some rows: the tokens they allow, and every other row as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.executor.base import Bitmask
from quire.executor.sampler import HostSampler
from quire.types import FinishReason, SamplingParams

from .chain_reference import defaults
from .reference import acceptable, ints, new_seq, penalties
from .test_chain import STEPS

VOCAB = 150


def words_of(allowed: np.ndarray) -> np.ndarray:
    """Lines of a bitmask from bool [lines, VOCAB]. Bits behind the vocabulary are noise."""
    bits = np.ones((len(allowed), -(-VOCAB // 32) * 32), np.bool_)
    bits[:, :VOCAB] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@given(penalties(), st.integers(0, 2**32), st.lists(st.integers(-1, 3), min_size=1, max_size=9))
@settings(max_examples=60)
def test_a_masked_row_is_the_definition_s_and_others_keep_every_bit(
    params: SamplingParams, seed: int, lines: list[int]
) -> None:
    """The definition knows a mask as allowed_token_ids. Rows may share a line."""
    rng = np.random.default_rng(seed)
    allowed = rng.random((4, VOCAB)) < 0.2
    allowed[:, 7] = True
    params = replace(params, logprobs=2)
    logits = {"logits": rng.normal(0, 2, (len(lines), VOCAB)).astype(np.float32)}
    slots = np.arange(len(lines), dtype=np.int32)
    masked, plain = (HostSampler(VOCAB, len(lines), threads=2) for _ in range(2))
    for slot in slots.tolist():
        for sampler in (masked, plain):
            sampler.add(slot, new_seq(params, [3, 9], seed=slot))
    found = masked.sample(logits, slots, slots + 2, Bitmask(words_of(allowed), ints(*lines)))
    expected = plain.sample(logits, slots, slots + 2)
    for row, line in enumerate(lines):
        if line < 0:
            assert found.token_ids[row] == expected.token_ids[row]
            assert found.logprobs[row] == expected.logprobs[row]
            continue
        narrowed = replace(params, allowed_token_ids=np.flatnonzero(allowed[line]).tolist())
        new = new_seq(narrowed, [3, 9], seed=row)
        assert int(found.token_ids[row]) in acceptable(logits["logits"][row], new, row + 2)


@pytest.mark.parametrize("mode", STEPS)
def test_steps_see_what_a_mask_leaves(mode: str) -> None:
    """A row under the mask of a grammar is a row whose other logits are -inf: the same token and surprise."""
    rng = np.random.default_rng(5)
    allowed = rng.random((1, VOCAB)) < 0.3
    logits = rng.normal(0, 3, (1, VOCAB)).astype(np.float32)
    left = np.where(allowed, logits, np.float32(-np.inf))
    params = defaults(**STEPS[mode])
    for seed in range(20):
        masked, plain = HostSampler(VOCAB, 1), HostSampler(VOCAB, 1)
        for sampler in (masked, plain):
            sampler.add(0, new_seq(params, [3, 9], seed=seed))
        mask = Bitmask(words_of(allowed), ints(0))
        token = masked.sample({"logits": logits}, ints(0), ints(2), mask).token_ids[0]
        assert allowed[0, token]
        assert token == plain.sample({"logits": left}, ints(0), ints(2)).token_ids[0]
        assert masked.surprise(0) == plain.surprise(0)


def test_a_mask_without_a_token_fails_its_row_for_that_reason() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[2] = -np.inf
    sampler = HostSampler(VOCAB, 3)
    for slot in range(3):
        sampler.add(slot, new_seq(SamplingParams(temperature=0)))
    nothing = Bitmask(np.zeros((1, 5), np.int32), ints(-1, 0, -1))
    result = sampler.sample({"logits": logits}, ints(0, 1, 2), ints(0, 0, 0), nothing)
    assert result.token_ids.tolist() == [0, -1, -1]
    assert result.failed == {1: FinishReason.NO_TOKEN, 2: FinishReason.ERROR}
