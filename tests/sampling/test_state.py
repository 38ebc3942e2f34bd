"""Slots: masks, bias, penalties and counts over a sequence's life; failures; refusals; memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.executor.base import Bitmask
from quire.executor.sampler import HostSampler
from quire.types import FinishReason, SamplingParams

from .reference import acceptable, as_rows, ints, new_seq, penalties, sample_one

GREEDY = {"temperature": 0.0}


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = np.array([0.0, 2.0, 1.0, 2.0, 2.0])
    assert sample_one(logits, new_seq(SamplingParams(**GREEDY))) == 1
    assert sample_one(np.array([-0.0, 0.0]), new_seq(SamplingParams(**GREEDY))) == 0
    wide = np.zeros(3000)
    wide[[1700, 2999]] = 1
    assert sample_one(wide, new_seq(SamplingParams(**GREEDY))) == 1700


def test_allowed_and_banned_tokens() -> None:
    logits = np.arange(100.0)
    allowed = SamplingParams(**GREEDY, allowed_token_ids=[3, 50, 7, 3])
    assert sample_one(logits, new_seq(allowed)) == 50
    both = SamplingParams(**GREEDY, allowed_token_ids=[3, 50, 7], banned_token_ids=[50])
    assert sample_one(logits, new_seq(both)) == 7
    assert sample_one(logits, new_seq(SamplingParams(**GREEDY, banned_token_ids=[99, 98, 99]))) == 97
    many = SamplingParams(**GREEDY, banned_token_ids=list(range(10, 100)))  # kept as a bitset
    assert sample_one(logits, new_seq(many)) == 9


@given(st.sets(st.integers(0, 69), min_size=1), st.sets(st.integers(0, 69)), st.integers(0, 2**32))
@settings(max_examples=100)
def test_masks_combine(allowed: set[int], banned: set[int], seed: int) -> None:
    """allowed_token_ids, banned_token_ids and a grammar's bitmask: a token must pass all three."""
    rng = np.random.default_rng(seed)
    grammar = rng.random(70) < 0.6
    bits = np.zeros(96, np.uint32)
    bits[:70] = grammar
    words = (bits.reshape(3, 32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32).view(np.int32)
    left = sorted((allowed - banned) & set(np.flatnonzero(grammar).tolist()))
    sampler = HostSampler(70, 1)
    if allowed <= banned:
        return
    params = SamplingParams(**GREEDY, allowed_token_ids=sorted(allowed), banned_token_ids=sorted(banned))
    sampler.add(0, new_seq(params))
    logits = rng.normal(0, 1, 70).astype(np.float32)
    result = sampler.sample({"logits": logits[None]}, ints(0), ints(0), Bitmask(words[None], ints(0)))
    if left:
        assert int(result.token_ids[0]) == max(left, key=lambda t: logits[t])
    else:
        assert result.failed == {0: FinishReason.NO_TOKEN}


def test_a_row_whose_tokens_have_no_probability_fails_for_its_own_reason() -> None:
    logits = np.array([[0.0, 1.0, -np.inf, -np.inf]] * 3 + [[-np.inf] * 4], np.float32)
    sampler = HostSampler(4, 4)
    asked = [{"allowed_token_ids": [2, 3]}, {"banned_token_ids": [0, 1]}, {}, {}]
    for slot, more in enumerate(asked):
        sampler.add(slot, new_seq(SamplingParams(**GREEDY, **more)))
    result = sampler.sample({"logits": logits}, ints(0, 1, 2, 3), ints(0, 0, 0, 0))
    assert result.failed == {0: FinishReason.NO_TOKEN, 1: FinishReason.NO_TOKEN, 3: FinishReason.ERROR}
    assert result.token_ids.tolist() == [-1, -1, 1, -1]


def test_min_tokens_holds_back_stop_ids() -> None:
    logits = np.array([9.0, 8.0, 1.0])
    params = SamplingParams(**GREEDY, min_tokens=2)
    for outputs, expected in ((0, 2), (1, 2), (2, 0), (3, 0)):
        seq = new_seq(params, [2] * (4 + outputs), 4, stop_ids=[0, 1])
        assert sample_one(logits, seq) == expected
    assert sample_one(logits, new_seq(params, [2] * 4, 4)) == 0  # nothing to hold back


def test_logit_bias_of_minus_100_bans_and_plus_100_forces() -> None:
    logits = np.random.default_rng(0).normal(0, 5, 50)
    best = int(np.argmax(logits))
    assert sample_one(logits, new_seq(SamplingParams(logit_bias={7: 100.0}))) == 7
    for seed in range(30):
        assert sample_one(logits, new_seq(SamplingParams(logit_bias={best: -100.0}), seed=seed)) != best


def test_frequency_and_presence_count_outputs_only() -> None:
    logits = np.array([5.0, 4.5, 3.0, 0.0])
    frequency = SamplingParams(**GREEDY, frequency_penalty=0.3)
    assert sample_one(logits, new_seq(frequency, [0, 0, 0, 0], 4)) == 0  # the prompt does not count
    assert sample_one(logits, new_seq(frequency, [3, 0], 1)) == 0  # 4.7
    assert sample_one(logits, new_seq(frequency, [3, 0, 0], 1)) == 1  # 4.4
    presence = SamplingParams(**GREEDY, presence_penalty=0.4)
    assert sample_one(logits, new_seq(presence, [3, 0, 0, 0], 1)) == 0  # 4.6, counted once
    negative = SamplingParams(**GREEDY, presence_penalty=-2.5)
    assert sample_one(logits, new_seq(negative, [0, 2], 1)) == 2


def test_repetition_counts_the_prompt_once_and_keeps_signs() -> None:
    params = SamplingParams(**GREEDY, repetition_penalty=2.0)
    assert sample_one(np.array([5.0, 2.6, 2.4]), new_seq(params, [0, 0, 0])) == 1  # 2.5, not 0.6
    assert sample_one(np.array([-1.0, -1.9, -2.1]), new_seq(params, [0])) == 1  # -2.0


params_of_penalties = penalties()


@given(
    params_of_penalties, st.lists(st.integers(0, 19), max_size=9), st.integers(0, 2**63), st.integers(0, 14)
)
@settings(max_examples=150)
def test_a_whole_life_with_preemption(
    params: SamplingParams, prompt: list[int], seed: int, preempted_at: int
) -> None:
    """State kept step by step equals state rebuilt from the tokens so far, and both the definition."""
    rng = np.random.default_rng(seed)
    sampler, tokens = HostSampler(20, 3), list(prompt)
    sampler.add(1, new_seq(params, prompt, seed=seed, stop_ids=[0, 1]))
    for step in range(15):
        if step == preempted_at:
            sampler.drop(1)
            sampler.add(1, new_seq(params, tokens, len(prompt), seed=seed, stop_ids=[0, 1]))
        logits = rng.normal(0, 1, (1, 20)).astype(np.float32)
        got = int(sampler.sample({"logits": logits}, ints(1), ints(len(tokens))).token_ids[0])
        now = new_seq(params, tokens, len(prompt), seed=seed, stop_ids=[0, 1])
        assert got in acceptable(logits[0], now, len(tokens))
        tokens.append(got)


def test_counts_survive_growth() -> None:
    """Thousands of distinct tokens in the table, each found again with its own count."""
    size = 5000
    tokens = list(range(1000)) + [t for t in range(1000, 5000) for _ in range(1 + t % 3)]
    seq = new_seq(SamplingParams(**GREEDY, frequency_penalty=1.0), tokens, 1000)
    logits = np.array([-9.0] * 1000 + [1.0 + t % 3 for t in range(1000, size)])  # all level after the penalty
    logits[4321] += 0.5
    assert sample_one(logits, seq) == 4321


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 15, 16, 511, 512, 1299])
@pytest.mark.parametrize(
    "params", [SamplingParams(**GREEDY), SamplingParams(top_p=0.5, banned_token_ids=[0, 15])]
)
def test_broken_rows_fail_alone(bad: float, at: int, params: SamplingParams) -> None:
    sampler = HostSampler(1300, 3)
    for slot in range(3):
        sampler.add(slot, new_seq(params))
    logits = np.random.default_rng(0).normal(0, 1, (3, 1300)).astype(np.float32)
    expected = sampler.sample({"logits": logits}, ints(0, 1, 2), ints(0, 0, 0))
    assert expected.failed == {}
    broken = logits.copy()
    broken[1, at] = bad
    result = sampler.sample({"logits": broken}, ints(0, 1, 2), ints(0, 0, 0))
    assert result.failed == {1: FinishReason.ERROR}
    assert result.token_ids.tolist() == [expected.token_ids[0], -1, expected.token_ids[2]]
    masked = logits.copy()
    masked[1, at] = -np.inf
    assert sampler.sample({"logits": masked}, ints(0, 1, 2), ints(0, 0, 0)).failed == {}


def test_nothing_left_to_sample_fails() -> None:
    empty = np.full(40, -np.inf)
    for params in (SamplingParams(), SamplingParams(**GREEDY), SamplingParams(logprobs=3)):
        assert sample_one(empty, new_seq(params)) == -1
    one = empty.copy()
    one[7] = 2.0
    for params in (SamplingParams(banned_token_ids=[7]), SamplingParams(**GREEDY, allowed_token_ids=[6])):
        assert sample_one(one, new_seq(params)) == -1
    assert sample_one(one, new_seq(SamplingParams(min_tokens=1), stop_ids=[7])) == -1


def test_a_failed_row_is_not_counted() -> None:
    sampler = HostSampler(4, 1)
    sampler.add(0, new_seq(SamplingParams(**GREEDY, frequency_penalty=2.0)))
    sampler.sample({"logits": np.full((1, 4), np.nan, np.float32)}, ints(0), ints(0))
    logits = as_rows(np.array([1.0, 0.0, 0.0, 0.0]))
    assert [int(sampler.sample({"logits": logits}, ints(0), ints(p)).token_ids[0]) for p in (0, 1)] == [0, 1]


def test_penalties_overflow_to_the_largest_number_not_to_infinity() -> None:
    big = float(np.finfo(np.float32).max)
    params = SamplingParams(repetition_penalty=1e-6, top_p=0.9)
    assert sample_one(np.array([big / 2, 3.0, -5.0]), new_seq(params, [0, 2])) == 0
    lowest = SamplingParams(repetition_penalty=1000.0)
    assert sample_one(np.array([-big, -np.inf]), new_seq(lowest, [0, 1])) == 0


def test_results_are_the_callers_own() -> None:
    sampler = HostSampler(3, 1)
    sampler.add(0, new_seq(SamplingParams(**GREEDY)))
    first = sampler.sample({"logits": as_rows(np.array([0.0, 1.0, 0.0]))}, ints(0), ints(0)).token_ids
    sampler.sample({"logits": as_rows(np.array([1.0, 0.0, 0.0]))}, ints(0), ints(1))
    assert first.tolist() == [1]


def test_no_rows() -> None:
    result = HostSampler(3, 1).sample({"logits": np.zeros((0, 3), np.float32)}, ints(), ints())
    assert (len(result.token_ids), result.failed, result.logprobs) == (0, {}, [])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="vocab"):
        HostSampler(0, 1)
    with pytest.raises(ValueError, match="max_slots"):
        HostSampler(5, 0)
    with pytest.raises(ValueError, match="threads"):
        HostSampler(5, 1, threads=0)
    with pytest.raises(ValueError, match="instruction set"):
        HostSampler(5, 1, "sse9")
    sampler, rows = HostSampler(5, 2), np.zeros((1, 5), np.float32)
    sampler.add(0, new_seq(SamplingParams(), [1, 2]))
    with pytest.raises(ValueError, match="slot: 0 is taken"):
        sampler.add(0, new_seq(SamplingParams()))
    with pytest.raises(ValueError, match="slot: 2 does not exist"):
        sampler.add(2, new_seq(SamplingParams()))
    with pytest.raises(ValueError, match="slot: 1 is not in use"):
        sampler.drop(1)
    with pytest.raises(ValueError, match="slot 1 is not in use"):
        sampler.sample({"logits": rows}, ints(1), ints(2))
    with pytest.raises(ValueError, match="another row"):
        sampler.sample({"logits": np.zeros((2, 5), np.float32)}, ints(0, 0), ints(2, 3))
    with pytest.raises(ValueError, match="inside the prompt"):
        sampler.sample({"logits": rows}, ints(0), ints(1))
    with pytest.raises(ValueError, match="vocabulary size"):
        sampler.sample({"logits": np.zeros((1, 4), np.float32)}, ints(0), ints(2))
    with pytest.raises(ValueError, match="slots"):
        sampler.sample({"logits": rows}, ints(0, 1), ints(2, 2))
    with pytest.raises(ValueError, match="positions"):
        sampler.sample({"logits": rows}, ints(0), ints(2, 2))
    with pytest.raises(ValueError, match="bitmask"):
        sampler.sample({"logits": rows}, ints(0), ints(2), Bitmask(np.zeros((1, 2), np.int32), ints(0)))
    for lines in ((), (1,), (-2,), (0, 0)):
        with pytest.raises(ValueError, match="bitmask"):
            sampler.sample(
                {"logits": rows}, ints(0), ints(2), Bitmask(np.zeros((1, 1), np.int32), ints(*lines))
            )
    for name, params in {
        "logit_bias": SamplingParams(logit_bias={5: 1.0}),
        "allowed_token_ids": SamplingParams(allowed_token_ids=[5]),
        "banned_token_ids": SamplingParams(banned_token_ids=[5]),
    }.items():
        with pytest.raises(ValueError, match=f"{name}: token id 5"):
            sampler.add(1, new_seq(params))
    with pytest.raises(ValueError, match="token_ids: token id 9"):
        sampler.add(1, new_seq(SamplingParams(presence_penalty=1.0), [9]))
    sampler.add(1, new_seq(SamplingParams(), [9]))  # tokens are looked at only for penalties


@pytest.mark.parametrize("wrong", [np.float64, np.float16, np.int32])
def test_logits_must_be_float32(wrong: type) -> None:
    sampler = HostSampler(5, 1)
    sampler.add(0, new_seq(SamplingParams()))
    with pytest.raises(TypeError):
        sampler.sample({"logits": np.zeros((1, 5), wrong)}, ints(0), ints(0))


def test_memory_stays_below_its_bound() -> None:
    size, slots, max_len, named = 3000, 6, 900, 300
    bound = HostSampler.memory_bound(size, slots, 2, max_len, named)
    sampler = HostSampler(size, slots, threads=2)
    empty = sampler.memory()
    rng = np.random.default_rng(0)
    for slot in range(slots):
        params = SamplingParams(
            repetition_penalty=1.1,
            logit_bias={int(t): 1.0 for t in rng.choice(size, 100, replace=False)},
            banned_token_ids=rng.choice(size, 60, replace=False).tolist(),
            allowed_token_ids=list(range(size)),
        )
        sampler.add(slot, new_seq(params, rng.integers(0, size, max_len).tolist(), 100))
    assert empty < sampler.memory() <= bound
    more = HostSampler.memory_bound(size, slots, 2, max_len, named, 80)
    assert HostSampler(size, slots, threads=2, max_rows=80).memory() - empty == more - bound
    for slot in range(slots):
        sampler.drop(slot)
    assert sampler.memory() == empty
    assert HostSampler.memory_bound(151936, 64, 2, 32768, 1024) < 64 << 20


def test_views_and_lists_are_not_copied_behind_the_callers_back() -> None:
    sampler = HostSampler(5, 2)
    sampler.add(0, new_seq(SamplingParams()))
    with pytest.raises(TypeError):
        sampler.sample({"logits": np.zeros((1, 10), np.float32)[:, ::2]}, ints(0), ints(0))
    with pytest.raises(TypeError):
        sampler.sample({"logits": np.zeros((1, 5), np.float32)}, np.zeros(1, np.int64), ints(0))  # type: ignore[arg-type]
