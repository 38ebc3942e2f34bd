"""Every step of the chain against its definition: the whole distribution that a row is drawn from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import _native
from quire.executor.sampler import HostSampler
from quire.parameters import TextTokens
from quire.types import SAMPLERS, NewSeq, SamplingParams

from .chain_reference import Reference, defaults, softmax
from .reference import EPSILON, as_rows, ints, new_seq, race, times_of
from .test_definition import hash_of, make_logits

KINDS = ["normal", "ties", "equal", "peaked", "clustered", "masked"]
STEPS = {
    "typical": {"typical_p": 0.6},
    "typical, little": {"typical_p": 0.01},
    "typical, hot": {"typical_p": 0.9, "temperature": 5.0},
    "typical, min_keep": {"typical_p": 0.1, "min_keep": 7},
    "sigma": {"top_n_sigma": 1.0},
    "sigma, nothing": {"top_n_sigma": 1e-3},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "xtc, half": {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    "xtc, all": {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    "xtc, min_keep": {"xtc_probability": 1.0, "xtc_threshold": 0.001, "min_keep": 5},
    "dynamic": {"dynatemp_range": 0.5, "temperature": 0.8},
    "dynamic, from 0": {"dynatemp_range": 1.0, "temperature": 0.0, "dynatemp_exponent": 0.5},
    "min_keep 1": {"top_p": 1e-6, "min_p": 1.0, "min_keep": 1, "top_n_sigma": 1e-3},
    "min_keep, top_p": {"top_p": 0.1, "min_keep": 20},
    "min_keep, min_p": {"min_p": 0.9, "min_keep": 3},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 2.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 1.0},
    "mirostat 2, nothing": {"mirostat": 2, "mirostat_tau": 0.0},
    "greedy": {"temperature": 0.0, "typical_p": 0.5},
    "order": {"samplers": ("top_p", "temperature", "top_k"), "temperature": 3.0, "top_p": 0.9, "top_k": 40},
    "llama.cpp": {"samplers": SAMPLERS, "temperature": 1.7, "top_k": 40, "top_p": 0.95, "typical_p": 0.95},
    "no step": {"samplers": (), "top_k": 1},
    "all": {"temperature": 3.0, "top_k": 200, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9, "top_n_sigma": 3.0,
            "xtc_probability": 0.5, "xtc_threshold": 0.02, "dynatemp_range": 1.0, "min_keep": 2},
}  # fmt: skip


def distribution(logits: np.ndarray, new: NewSeq, position: int, isa: str = "") -> np.ndarray:
    """What a fresh sampler draws the row's token from; and it draws that of the race."""
    sampler = HostSampler(len(logits), 1, isa)
    sampler.add(0, new)
    found = np.zeros((1, len(logits)), np.float32)
    made = sampler.guess({"logits": as_rows(logits)}, ints(0), ints(position), 1, found)
    assert made.token_ids[0, 0] in race(
        np.arange(len(logits)), np.maximum(found[0], 1e-300), times_of(new, position, len(logits))
    )
    assert sampler.sample({"logits": as_rows(logits)}, ints(0), ints(position)).token_ids == made.token_ids[0]
    return found[0]


def assert_defined(logits: np.ndarray, new: NewSeq, position: int, isa: str = "") -> None:
    """The distribution is that of the reference, with boundaries moved by up to EPSILON."""
    got = distribution(logits, new, position, isa)
    expected = []
    for nudge in (0, -EPSILON, EPSILON):
        left = Reference(new, position, nudge).run(logits)
        expected.append(softmax(left))
    assert any(np.allclose(got, one, rtol=2e-4, atol=1e-7) for one in expected), (
        np.flatnonzero(got), np.flatnonzero(expected[0]),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", STEPS)
def test_a_step_is_its_definition(mode: str, kind: str) -> None:
    rng = np.random.default_rng(hash_of(mode + kind))
    params = defaults(**STEPS[mode])
    for size in (1, 2, 3, 17, 130, 700, 3000):
        logits = make_logits(kind, size, rng)
        new = new_seq(params, seed=int(rng.integers(2**63)), sample_index=size % 3)
        assert_defined(logits, new, int(rng.integers(2**31 - 1)))


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_step_has_its_name(name: str) -> None:
    """A step alone, with parameters for all of them: none has another's place."""
    values = {**STEPS["all"], "repetition_penalty": 2.0, "dry_multiplier": 5.0, "samplers": (name,)}
    logits = make_logits("normal", 300, np.random.default_rng(1))
    new = new_seq(defaults(**values), [5, 6, 7, 5, 6], 2, seed=3)
    assert_defined(logits, new, 5)


@given(
    st.permutations(SAMPLERS),
    st.integers(0, len(SAMPLERS)),
    st.lists(st.integers(0, 39), max_size=30),
    st.lists(st.floats(-20, 20, width=32), min_size=40, max_size=40),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=150, deadline=None)
def test_any_order(order: list[str], count: int, tokens: list[int], values: list[float], seed: int) -> None:
    params = defaults(
        samplers=tuple(order[:count]), temperature=1.5, top_k=30, top_p=0.9, min_p=0.01, typical_p=0.9,
        top_n_sigma=2.5, xtc_probability=0.5, xtc_threshold=0.05, dry_multiplier=1.0, repetition_penalty=1.3,
        frequency_penalty=0.2, repeat_last_n=7, min_keep=2,
    )  # fmt: skip
    new = new_seq(params, tokens, len(tokens) // 2, seed=seed)
    got = distribution(np.array(values, np.float32), new, len(tokens))
    # Only what is at a distance from all boundaries, also from those that steps after a cut have.
    left = [Reference(new, len(tokens), nudge).run(np.array(values)) for nudge in (0, -1e-4, 1e-4)]
    if all(((one > -np.inf) == (left[0] > -np.inf)).all() for one in left):
        np.testing.assert_allclose(got, softmax(left[0]), rtol=1e-3, atol=1e-6)


def test_the_typical_token_is_not_always_the_likeliest() -> None:
    """The entropy is 3.1 nats: nearer to 4.6, the surprise of the rare tokens, than to 0.9."""
    logits = np.log(np.array([0.4] + [0.01] * 60))
    got = distribution(logits, new_seq(defaults(typical_p=0.095)), 0)
    assert np.flatnonzero(got).tolist() == list(range(1, 11))  # of equals the lower ids


def test_xtc_leaves_the_last_of_the_top_choices() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04]))
    asked = {"xtc_probability": 1.0, "xtc_threshold": 0.1}
    assert np.flatnonzero(distribution(logits, new_seq(defaults(**asked)), 0)).tolist() == [2, 3, 4]
    alone = np.log(np.array([0.9, 0.06, 0.04]))
    assert np.flatnonzero(distribution(alone, new_seq(defaults(**asked)), 0)).tolist() == [0, 1, 2]
    kept = defaults(**asked, min_keep=4)
    assert np.flatnonzero(distribution(logits, new_seq(kept), 0)).tolist() == [0, 1, 2, 3, 4]
    rare = defaults(xtc_probability=0.3, xtc_threshold=0.1)
    left = [len(np.flatnonzero(distribution(logits, new_seq(rare, seed=seed), 0))) for seed in range(400)]
    assert set(left) == {3, 5}
    assert 80 < left.count(3) < 160


# ---- mirostat -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_follows_the_surprise_of_what_was_sampled(version: int) -> None:
    rng = np.random.default_rng(version)
    params = defaults(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.2, temperature=1.2)
    new = new_seq(params, [1, 2], seed=9)
    sampler = HostSampler(500, 1)
    sampler.add(0, new)
    mu = 6.0  # twice the target
    assert sampler.surprise(0) == mu
    surprises = []
    for position in range(2, 120):
        logits = rng.normal(0, 2, 500).astype(np.float32)
        left = Reference(new, position, 0, mu).run(logits)
        token = int(sampler.sample({"logits": as_rows(logits)}, ints(0), ints(position)).token_ids[0])
        assert left[token] > -np.inf
        surprises.append(-np.log2(softmax(left)[token]))
        mu = Reference(new, position, 0, mu).next_mu(left, token)
        assert sampler.surprise(0) == pytest.approx(mu, abs=1e-4)
        mu = sampler.surprise(0)
    assert np.mean(surprises[30:]) == pytest.approx(3.0, abs=0.4)


def test_mirostat_goes_on_where_it_was() -> None:
    """Preempted after each token and started again elsewhere, with drafts of others in its steps or without."""
    rng = np.random.default_rng(0)
    table = rng.normal(0, 2, (40, 300)).astype(np.float32)
    params = defaults(mirostat=2, mirostat_tau=2.0)
    whole, tokens = HostSampler(300, 1), [7]
    whole.add(0, new_seq(params, tokens, seed=5))
    for row in table:
        tokens.append(int(whole.sample({"logits": row[None]}, ints(0), ints(len(tokens))).token_ids[0]))
    known, mu = [7], None
    for i, row in enumerate(table):
        again = HostSampler(300, 2, max_rows=3)
        again.add(1, new_seq(params, known, 1, seed=5))
        again.drop(1)
        resumed = new_seq(params, known, 1, seed=5)
        resumed.surprise = mu
        again.add(1, resumed)
        again.add(0, new_seq(SamplingParams()))
        if i % 2:
            rows = np.stack([table[0], table[1], row])
            made = again.verify({"logits": rows}, ints(0, 0, 1), ints(0, 1, len(known)), ints(3, -1, -1))
            token = int(made.token_ids[2])
            before = again.surprise(1)
            again.commit(ints(1), ints(token))
            assert again.surprise(1) != before
        else:
            token = int(again.sample({"logits": row[None]}, ints(1), ints(len(known))).token_ids[0])
        mu = again.surprise(1)
        again.commit(ints(1), ints(4))  # a token that was not sampled says nothing
        assert again.surprise(1) == mu
        known.append(token)
    assert known == tokens


def test_mirostat_takes_no_drafts() -> None:
    sampler = HostSampler(8, 1, max_rows=2)
    sampler.add(0, new_seq(defaults(mirostat=1)))
    with pytest.raises(ValueError, match="mirostat"):
        sampler.verify({"logits": np.zeros((2, 8), np.float32)}, ints(0, 0), ints(0, 1), ints(3, -1))
    with pytest.raises(ValueError, match="slot"):
        sampler.surprise(1)


# ---- what looks back ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 4), max_size=90),
    st.integers(0, 90),
    st.integers(0, 5),
    st.sampled_from([-1, 0, 1, 2, 9]),
    st.sets(st.integers(0, 4), max_size=2),
)
@settings(max_examples=150, deadline=None)
def test_dry(tokens: list[int], prompt_len: int, allowed: int, window: int, breakers: set[int]) -> None:
    params = defaults(dry_multiplier=0.7, dry_base=1.3, dry_allowed_length=allowed, dry_penalty_last_n=window)
    texts = TextTokens(breakers=tuple(breakers))
    new = new_seq(params, tokens, min(prompt_len, len(tokens)), texts=texts)
    logits = np.array([0.5, 0.1, -0.3, 0.2, 0.0, 1.0], np.float32)
    assert_defined(logits, new, len(tokens))


def test_dry_is_bounded() -> None:
    params = defaults(dry_multiplier=100.0, dry_base=10.0, dry_allowed_length=0)
    got = distribution(np.zeros(4), new_seq(params, [1] * 5000), 5000)
    np.testing.assert_allclose(got, [1 / 3, 0, 1 / 3, 1 / 3], rtol=1e-6)


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(0, 20), st.sampled_from([-1, 0, 1, 3, 50]))
@settings(max_examples=100, deadline=None)
def test_penalties_of_a_window(tokens: list[int], prompt_len: int, window: int) -> None:
    params = defaults(
        repeat_last_n=window, repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2
    )
    new = new_seq(params, tokens, min(prompt_len, len(tokens)))
    assert_defined(np.array([0.5, 0.1, -0.3, 0.2, 0.0, 1.0], np.float32), new, len(tokens))


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.integers(0, 12),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_bad_words(tokens: list[int], prompt_len: int, words: list[tuple[int, ...]]) -> None:
    texts = TextTokens(bad_words=tuple(words))
    new = new_seq(SamplingParams(bad_words=["x"]), tokens, min(prompt_len, len(tokens)), texts=texts)
    assert_defined(np.array([0.5, 0.1, -0.3, 0.2, 0.0], np.float32), new, len(tokens))


def test_biases_of_texts_add_up() -> None:
    params = SamplingParams(logit_bias={0: 1.0, "a": 2.0})
    texts = TextTokens(biases=((0, 2.0), (1, 2.0), (1, 2.0)))
    got = distribution(np.zeros(3), new_seq(params, texts=texts), 0)
    np.testing.assert_allclose(got, softmax(np.array([3.0, 4.0, 0.0])), rtol=1e-5)


# ---- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_instruction_sets(isa: str) -> None:
    rng = np.random.default_rng(2)
    for number, values in enumerate(STEPS.values()):
        logits = rng.normal(0, 3, 20011).astype(np.float32)
        new = new_seq(defaults(**values), [1, 2, 1], seed=number)
        assert (distribution(logits, new, 3, isa) == distribution(logits, new, 3)).all()


def test_memory_stays_below_its_bound() -> None:
    sampler = HostSampler(1000, 2)
    bound = HostSampler.memory_bound(1000, 2, 1, max_len=3000, named=40)
    texts = TextTokens(((1, 2, 3),) * 5, tuple(range(15)), ((1, 2.0),) * 5)
    for slot in range(2):
        params = SamplingParams(dry_multiplier=1.0, bad_words=["x"], samplers=SAMPLERS, mirostat=2)
        sampler.add(slot, new_seq(params, [1], texts=texts))
    for position in range(1, 3000):
        assert sampler.memory() <= bound
        sampler.commit(ints(0, 1), ints(position % 7, 5))
