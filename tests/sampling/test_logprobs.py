"""Log-probabilities and ranks come from the raw logits, whatever is done to them afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import _native
from quire.executor.sampler import HostSampler
from quire.logprobs import TokenLogprob
from quire.types import MAX_LOGPROBS, SamplingParams

from .reference import as_rows, ints, new_seq, position_logprobs


def assert_same(got: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [(t.token_id, t.rank) for t in got] == [(t.token_id, t.rank) for t in expected]
    np.testing.assert_allclose([t.logprob for t in got], [t.logprob for t in expected], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("size", [1, 5, 16, 1000, 1025, 20011])
@pytest.mark.parametrize("count", [0, 1, 5, MAX_LOGPROBS])
def test_sampled_logprobs(size: int, count: int) -> None:
    rng = np.random.default_rng(size + count)
    params = SamplingParams(
        temperature=3.0, top_k=30, logprobs=count, logit_bias={0: -50.0}, frequency_penalty=1.0
    )
    for logits in (rng.normal(0, 4, size), rng.integers(0, 4, size)):
        row = as_rows(logits)
        sampler = HostSampler(size, 1)
        sampler.add(0, new_seq(params, [0, 0], 1))
        for position in range(2, 12):
            result = sampler.sample({"logits": row}, ints(0), ints(position))
            entry = result.logprobs[0]
            assert entry is not None
            assert_same(entry[0], position_logprobs(row[0], int(result.token_ids[0]), count))


def test_matches_torch_log_softmax() -> None:
    logits = as_rows(np.random.default_rng(1).normal(0, 5, (4, 50257)))
    expected = torch.log_softmax(torch.tensor(logits).double(), -1)
    targets = ints(0, 7, 50256, 999)
    got = HostSampler(50257, 1).prompt_logprobs({"logits": logits}, targets, 10)
    assert got is not None
    for i, entry in enumerate(got):
        best = torch.topk(expected[i], 10)
        assert entry[0].token_id == targets[i]
        assert entry[0].logprob == pytest.approx(float(expected[i, targets[i]]), abs=3e-6)
        assert entry[0].rank == 1 + int((expected[i] > expected[i, targets[i]]).sum())
        assert [t.token_id for t in entry[1:]] == best.indices.tolist()
        np.testing.assert_allclose([t.logprob for t in entry[1:]], best.values.tolist(), atol=3e-6)


@given(
    st.lists(st.sampled_from([-np.inf, -80.0, -1.0, -0.0, 0.0, 1.0, 2.0, 30.0]), min_size=1, max_size=60),
    st.integers(0, 64),
    st.data(),
)
@settings(max_examples=200)
def test_prompt_logprobs_with_ties_and_impossible_tokens(
    values: list[float], count: int, data: st.DataObject
) -> None:
    row = as_rows(np.array(values))
    target = data.draw(st.integers(0, len(values) - 1))
    got = HostSampler(len(values), 1).prompt_logprobs({"logits": row}, ints(target), count)
    if max(values) == -np.inf:
        assert got is None
    else:
        assert got is not None
        assert_same(got[0], position_logprobs(row[0], target, count))


def test_only_slots_that_request_logprobs_get_them() -> None:
    sampler = HostSampler(9, 3)
    for slot, count in enumerate((None, 2, None)):
        sampler.add(slot, new_seq(SamplingParams(logprobs=count)))
    rows = np.zeros((3, 9), np.float32)
    got = sampler.sample({"logits": rows}, ints(2, 1, 0), ints(0, 0, 0)).logprobs
    assert got[0] is None
    assert got[2] is None
    assert got[1] is not None
    assert len(got[1][0]) == 3
    sampler.drop(1)
    sampler.add(1, new_seq(SamplingParams()))
    assert sampler.sample({"logits": rows}, ints(0, 1, 2), ints(0, 0, 0)).logprobs == [None] * 3


def test_failed_row_has_no_logprobs() -> None:
    sampler = HostSampler(9, 2)
    for slot in range(2):
        sampler.add(slot, new_seq(SamplingParams(logprobs=1)))
    rows = np.zeros((2, 9), np.float32)
    rows[0, 3] = np.nan
    result = sampler.sample({"logits": rows}, ints(0, 1), ints(0, 0))
    assert list(result.failed) == [0]
    assert result.logprobs[0] is None
    assert result.logprobs[1] is not None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_prompt_logprobs_of_a_broken_row(bad: float) -> None:
    rows = np.zeros((3, 700), np.float32)
    rows[1, 650] = bad
    assert HostSampler(700, 1).prompt_logprobs({"logits": rows}, ints(0, 0, 0), 2) is None


def test_prompt_logprobs_refuses_bad_arguments() -> None:
    sampler, rows = HostSampler(10, 1), np.zeros((1, 10), np.float32)
    with pytest.raises(ValueError, match="target_token_ids: token id 10"):
        sampler.prompt_logprobs({"logits": rows}, ints(10), 1)
    with pytest.raises(ValueError, match="top_n"):
        sampler.prompt_logprobs({"logits": rows}, ints(1), MAX_LOGPROBS + 1)
    with pytest.raises(ValueError, match="target_token_ids: as many"):
        sampler.prompt_logprobs({"logits": rows}, ints(1, 2), 1)
    assert sampler.prompt_logprobs({"logits": np.zeros((0, 10), np.float32)}, ints(), 1) == []


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_same_bits_on_every_instruction_set(isa: str) -> None:
    rows = as_rows(np.random.default_rng(2).normal(0, 3, (3, 3001)))
    expected = HostSampler(3001, 1).prompt_logprobs({"logits": rows}, ints(1, 2, 3), 20)
    assert HostSampler(3001, 1, isa).prompt_logprobs({"logits": rows}, ints(1, 2, 3), 20) == expected
