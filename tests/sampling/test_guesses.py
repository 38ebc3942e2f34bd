"""What a draft names for a place: the token that would be sampled, then those that come next."""

from __future__ import annotations

import numpy as np
import pytest

from quire.executor.sampler import HostSampler
from quire.types import SamplingParams

from .reference import as_rows, finishes, ints, kept, new_seq, times_of

MODES = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "top-k 5": SamplingParams(top_k=5),
    "top-p": SamplingParams(top_p=0.9),
}


@pytest.mark.parametrize("isa", ["baseline", ""])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_named_in_their_order(mode: str, isa: str) -> None:
    rng, params = np.random.default_rng(4), MODES[mode]
    for size in (3, 64, 500, 3000):
        logits = rng.normal(0, 3, size).astype(np.float32)
        sampler, new = HostSampler(size, 1, isa, max_rows=6), new_seq(params, seed=9)
        sampler.add(0, new)
        rows, slots, positions = {"logits": np.tile(as_rows(logits), (6, 1))}, ints(*[0] * 6), ints(*range(6))
        made = sampler.guess(rows, slots, positions, 8)
        for position in range(6):
            ids, shares = kept(logits, params)
            expected = (
                np.argsort(-logits, kind="stable")
                if params.temperature == 0
                else finishes(ids, shares, times_of(new, position, size))
            )[:8]
            named, sure = made.token_ids[position], made.sure[position]
            assert named[: len(expected)].tolist() == expected.tolist()
            assert (named[len(expected) :] == -1).all()
            assert (sure[len(expected) :] == 0).all()
            assert (np.diff(sure) <= 0).all()
            assert 0 < sure.sum() < 1 + 1e-5
        first = sampler.sample({"logits": as_rows(logits)}, ints(0), ints(0)).token_ids
        assert made.token_ids[0, 0] == first[0]


def test_probabilities_are_named_at_temperature_0() -> None:
    logits = np.array([1.0, 3.0, -np.inf, 2.0], np.float32)
    sampler = HostSampler(4, 1, max_rows=2)
    sampler.add(0, new_seq(SamplingParams(temperature=0)))
    made = sampler.guess({"logits": np.tile(logits, (2, 1))}, ints(0, 0), ints(0, 0), 4)
    assert made.token_ids.tolist() == [[1, 3, 0, -1]] * 2
    expected = np.exp(logits) / np.exp(logits).sum()
    assert made.sure[0] == pytest.approx([*np.sort(expected)[:0:-1], 0.0], rel=1e-5)


def test_a_row_that_fails_names_nothing() -> None:
    sampler = HostSampler(4, 1, max_rows=2)
    sampler.add(0, new_seq(SamplingParams()))
    rows = {"logits": np.array([[np.nan, 0, 0, 0], [0, 0, 0, 0]], np.float32)}
    made = sampler.guess(rows, ints(0, 0), ints(0, 1), 2)
    assert made.token_ids[0].tolist() == [-1, -1]
    assert (made.token_ids[1] >= 0).all()


def test_bad_counts_are_refused() -> None:
    sampler = HostSampler(4, 1)
    sampler.add(0, new_seq(SamplingParams()))
    with pytest.raises(ValueError, match="guesses: expected a line of up to 64"):
        sampler.guess({"logits": np.zeros((1, 4), np.float32)}, ints(0), ints(0), 65)
