"""Several rows of one slot: what they sample is what they would, one at a time, after the drafts before them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.executor.sampler import HostSampler
from quire.types import SamplingParams

from .reference import ints, new_seq, penalties

VOCAB = 20
params = penalties(
    logprobs=st.sampled_from([None, 2]),
    repeat_last_n=st.sampled_from([-1, -1, 0, 3]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_allowed_length=st.integers(0, 2),
    dry_penalty_last_n=st.sampled_from([-1, 0, 6]),
    top_n_sigma=st.sampled_from([-1.0, 1.0]),
    samplers=st.sampled_from([None, None, ("dry", "top_k", "temperature", "penalties")]),
)


@settings(max_examples=100)
@given(
    st.lists(params, min_size=2, max_size=2), st.lists(st.integers(0, 19), max_size=9), st.integers(0, 2**63)
)
def test_verify_and_commit_equal_one_token_at_a_time(
    asked: list[SamplingParams], prompt: list[int], seed: int
) -> None:
    """Two sequences run together with drafts of which some are right; each also runs alone without any."""
    rng = np.random.default_rng(seed)
    drafting, alone = HostSampler(VOCAB, 4, max_rows=12, threads=2), HostSampler(VOCAB, 4)
    table = rng.normal(0, 2, (2, 64, VOCAB)).astype(np.float32)  # a sequence's logits at each position
    tokens = [list(prompt), list(prompt)]
    for slot, wanted in enumerate(asked):
        for sampler in (drafting, alone):
            sampler.add(slot, new_seq(wanted, prompt, seed=seed % 97, stop_ids=[0, 1]))
    for _ in range(6):
        slots, positions, drafts, expected = [], [], [], []
        for slot, known in enumerate(tokens):
            ahead = HostSampler(VOCAB, 1)
            ahead.add(0, new_seq(asked[slot], known, len(prompt), seed=seed % 97, stop_ids=[0, 1]))
            right = [
                int(ahead.sample({"logits": table[slot, p][None]}, ints(0), ints(p)).token_ids[0])
                for p in range(len(known), len(known) + 5)
            ]
            guesses = [
                t if rng.random() < 0.7 else int(rng.integers(VOCAB)) for t in right[: rng.integers(5)]
            ]
            agree = [a == b for a, b in zip(guesses, right, strict=False)]
            expected.append(right[: agree.index(False) + 1 if False in agree else len(agree) + 1])
            slots += [slot] * (len(guesses) + 1)
            positions += range(len(known), len(known) + len(guesses) + 1)
            drafts += [*guesses, -1]
        rows = np.stack([table[s, p] for s, p in zip(slots, positions, strict=True)])
        seen = drafting.verify({"logits": rows}, ints(*slots), ints(*positions), ints(*drafts))
        assert not seen.failed
        accepted = []
        for slot, made in enumerate(expected):
            first = slots.index(slot)
            assert seen.token_ids[first : first + len(made)].tolist() == made
            for k, token in enumerate(made):
                one = alone.sample(
                    {"logits": table[slot, len(tokens[slot])][None]}, ints(slot), ints(len(tokens[slot]))
                )
                assert one.token_ids.tolist() == [token]
                assert one.logprobs == seen.logprobs[first + k : first + k + 1]
                tokens[slot].append(token)
                accepted.append(first + k)
        drafting.commit(ints(*slots)[accepted], seen.token_ids[accepted])


def test_tokens_that_are_only_verified_are_not_counted() -> None:
    greedy = SamplingParams(temperature=0.0, presence_penalty=5.0)
    sampler = HostSampler(4, 1, max_rows=3)
    sampler.add(0, new_seq(greedy))
    logits = np.tile(np.array([4.0, 3.0, 2.0, 1.0], np.float32), (3, 1))
    for _ in range(2):
        seen = sampler.verify({"logits": logits}, ints(0, 0, 0), ints(0, 1, 2), ints(0, 1, -1))
        assert seen.token_ids.tolist() == [0, 1, 2]
    assert sampler.verify({"logits": logits[:2]}, ints(0, 0), ints(0, 1), ints(3, -1)).token_ids.tolist() == [
        0,
        0,
    ]
    sampler.commit(ints(0, 0), ints(0, 1))
    assert sampler.sample({"logits": logits[:1]}, ints(0), ints(2)).token_ids.tolist() == [2]


def test_rows_that_do_not_follow_on_each_other_are_refused() -> None:
    sampler = HostSampler(4, 2, max_rows=3)
    sampler.add(0, new_seq(SamplingParams(presence_penalty=1.0)))
    sampler.add(1, new_seq(SamplingParams()))
    logits = np.zeros((3, 4), np.float32)
    for slots, positions, drafts, message in (
        ([0, 0, 1], [0, 1, 0], [1, 2, -1], "row 2: slot 1 does not follow on the draft before"),
        ([0, 0, 1], [0, 2, 0], [1, -1, -1], "row 1: slot 0 does not follow on the draft before"),
        ([0, 0, 1], [0, 1, 0], [-1, -1, -1], "row 1: slot 0 has another row in this step"),
        ([0, 0, 1], [0, 1, 0], [1, -1, 1], "the last row cannot have one"),
        ([0, 0, 1], [0, 1, 0], [4, -1, -1], "row 0: slot 0 has a draft 4 outside the vocabulary"),
        ([0, 0, 1], [0, 1, 0], [1, -1], "drafts: expected one per row"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.verify({"logits": logits}, ints(*slots), ints(*positions), ints(*drafts))
    with pytest.raises(ValueError, match="4 rows, the limit is 3"):
        sampler.verify(
            {"logits": np.zeros((4, 4), np.float32)}, ints(0, 0, 0, 0), ints(0, 1, 2, 3), ints(1, 1, 1, -1)
        )
    with pytest.raises(ValueError, match="slot 2 is not in use"):
        sampler.commit(ints(0, 2), ints(1, 1))
    with pytest.raises(ValueError, match="tokens: token id 4"):
        sampler.commit(ints(0), ints(4))
