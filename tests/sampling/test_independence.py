"""A row's token depends on its logits, state and position: not on neighbours, order, threads or kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import _native
from quire.executor.sampler import HostSampler
from quire.types import NewSeq, SamplingParams

from .reference import as_rows, ints, new_seq, sample_one

SIZE = 2600


RARER: list[dict[str, Any]] = [
    {},
    {},
    {"typical_p": 0.8, "min_keep": 2},
    {"mirostat": 1},
    {"mirostat": 2, "mirostat_tau": 2.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01, "dry_multiplier": 1.0, "dry_allowed_length": 0},
    {"samplers": ("top_k", "penalties", "typ_p"), "repeat_last_n": 3, "top_n_sigma": 2.0},
    {"dynatemp_range": 0.5, "top_n_sigma": 2.0},
]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[NewSeq, int]:
    """A sequence with any parameters, and the seed of its logits."""
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 4.0])),
        top_k=draw(st.sampled_from([0, 1, 10, 1500])),
        top_p=draw(st.sampled_from([1.0, 0.5, 0.95])),
        min_p=draw(st.sampled_from([0.0, 0.02])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.4])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, -0.3])),
        logit_bias=draw(st.sampled_from([{}, {5: 3.0}])),
        allowed_token_ids=draw(st.sampled_from([None, list(range(0, SIZE, 3))])),
        banned_token_ids=draw(st.sampled_from([(), (0, 1, 2)])),
        logprobs=draw(st.sampled_from([None, 3])),
        **draw(st.sampled_from(RARER)),
    )
    tokens = draw(st.lists(st.integers(0, SIZE - 1), max_size=12))
    seq = new_seq(params, tokens, len(tokens) // 2, seed=draw(st.integers(0, 2**64 - 1)))
    return seq, draw(st.integers(0, 50))


def logits_of(seed: int) -> np.ndarray:
    row = np.random.default_rng(seed).normal(0, 3, SIZE).astype(np.float32)
    if seed % 5 == 0:
        row[seed] = np.nan if seed % 2 else np.inf
    return row


@given(
    st.lists(sequences(), min_size=2, max_size=8),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 2, 3]),
)
@settings(max_examples=80)
def test_neighbours_order_and_threads(rows: list[tuple[NewSeq, int]], random: object, threads: int) -> None:
    alone = [sample_one(logits_of(seed), seq) for seq, seed in rows]
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    sampler = HostSampler(SIZE, 9, threads=threads)
    for i, (seq, _) in enumerate(rows):
        sampler.add(8 - i, seq)
    logits = np.stack([logits_of(rows[i][1]) for i in order])
    slots = ints(*(8 - i for i in order))
    positions = ints(*(len(rows[i][0].token_ids) for i in order))
    result = sampler.sample({"logits": logits}, slots, positions)
    assert result.token_ids.tolist() == [alone[i] for i in order]
    assert list(result.failed) == [k for k, i in enumerate(order) if alone[i] == -1]


@given(sequences(), st.sampled_from(_native.supported_isas()))
@settings(max_examples=150)
def test_instruction_sets(row: tuple[NewSeq, int], isa: str) -> None:
    """Not within a tolerance: the kernels use no fused operation, so the bits are equal."""
    seq, seed = row
    logits = logits_of(seed)
    assert sample_one(logits, seq, isa=isa) == sample_one(logits, seq, isa="baseline")


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_instruction_sets_on_a_large_vocabulary(isa: str) -> None:
    size, rows = 50257, 6
    logits = as_rows(np.random.default_rng(0).normal(0, 2, (rows, size)))
    modes = [
        SamplingParams(),
        SamplingParams(top_p=0.9, temperature=3.0),
        SamplingParams(top_k=2000, temperature=5.0),
        SamplingParams(min_p=0.001),
        SamplingParams(top_k=9000, top_p=0.8, temperature=9.0),
        SamplingParams(temperature=0.0),
    ]
    for repeat in range(8):
        got = [sample_one(logits[i], new_seq(modes[i], seed=repeat), isa=isa) for i in range(rows)]
        assert got == [sample_one(logits[i], new_seq(modes[i], seed=repeat)) for i in range(rows)]


def test_the_row_number_does_not_matter() -> None:
    logits = np.tile(as_rows(np.random.default_rng(1).normal(0, 1, SIZE)), (7, 1))
    sampler = HostSampler(SIZE, 7)
    for slot in range(7):
        sampler.add(slot, new_seq(SamplingParams(temperature=2.0), seed=4))
    got = sampler.sample({"logits": logits}, np.arange(7, dtype=np.int32), np.full(7, 3, np.int32)).token_ids
    assert len(set(got.tolist())) == 1


def maxima_of(logits: np.ndarray) -> np.ndarray:
    """The maxima that an executor computes along with its logits; see program.Output."""
    padded = np.pad(logits, ((0, 0), (0, -logits.shape[1] % 64)), constant_values=-np.inf)
    spans = padded.reshape(len(logits), -1, 64)
    with np.errstate(invalid="ignore"):
        return np.where((spans < np.inf).all(2), spans.max(2), np.float32(np.nan))


@given(sequences(), st.sampled_from(_native.supported_isas()), st.integers(0, 3))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_maxima_change_nothing(row: tuple[NewSeq, int], isa: str, ties: int) -> None:
    """Tokens, failures, log-probabilities and ranks, also where logits are equal or -inf."""
    seq, seed = row
    logits = as_rows(logits_of(seed))
    if ties:
        logits = np.round(logits / ties) * ties
        logits[:, seed :: ties + 1] = -np.inf
    found = []
    for maxima in (None, maxima_of(logits)):
        sampler = HostSampler(SIZE, 1, isa)
        sampler.add(0, seq)
        sampled = sampler.sample({"logits": logits, "maxima": maxima}, ints(0), ints(len(seq.token_ids)))
        scored = sampler.prompt_logprobs({"logits": logits, "maxima": maxima}, ints(7), 3)
        found.append((sampled.token_ids.tolist(), sampled.failed, sampled.logprobs, scored))
    assert found[0] == found[1]


def test_maxima_are_read_instead_of_logits() -> None:
    """Negative control: with another row's maxima the greatest logit is not looked for."""
    logits = as_rows(np.arange(SIZE))
    sampler = HostSampler(SIZE, 1)
    sampler.add(0, new_seq(SamplingParams(temperature=0)))
    wrong = maxima_of(logits)
    wrong[0, 8:] = -np.inf  # a span of the first block is the greatest
    assert sampler.sample({"logits": logits, "maxima": wrong}, ints(0), ints(0)).token_ids[0] == 511
    with pytest.raises(ValueError, match="maxima"):
        sampler.sample({"logits": logits, "maxima": wrong[:, 1:].copy()}, ints(0), ints(0))


def test_an_executor_lends_its_threads() -> None:
    executor = _native.Executor("", 2)
    lent = HostSampler(SIZE, 8, executor=executor)
    own = HostSampler(SIZE, 8)
    logits = as_rows(np.random.default_rng(1).normal(0, 3, (8, SIZE)))
    slots = np.arange(8, dtype=np.int32)
    for slot in range(8):
        for sampler in (lent, own):
            sampler.add(slot, new_seq(SamplingParams(top_p=0.9), seed=slot))
    for position in range(30):
        positions = np.full(8, position, np.int32)
        expected = own.sample({"logits": logits}, slots, positions).token_ids
        assert (lent.sample({"logits": logits}, slots, positions).token_ids == expected).all()


def test_logits_are_left_alone() -> None:
    logits = as_rows(np.random.default_rng(1).normal(0, 3, SIZE))
    before = logits.copy()
    logits.setflags(write=False)
    params = SamplingParams(allowed_token_ids=[1, 2], repetition_penalty=2.0, logit_bias={1: 1.0})
    sample_one(logits, new_seq(params, [1, 2, 3]))
    assert (logits == before).all()
