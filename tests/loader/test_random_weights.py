"""Random weights: reproducible, independent of reading order and blocks, and distributed as they say."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.weight_files import linear, vector
from quire.loader import RandomWeights

PARAMS = [
    linear("w", ("a.weight", 301, 37), ("b.weight", 64, 37)),
    vector("norm", ("norm.weight", 37)),
    vector("w.bias", ("a.bias", 301), ("b.bias", 64)),
]


def as_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_shapes_and_names() -> None:
    weights = RandomWeights(PARAMS)
    assert list(weights.names()) == ["a.weight", "b.weight", "norm.weight", "a.bias", "b.bias"]
    assert weights.info("a.weight").shape == (301, 37)
    assert weights.info("a.weight").dtype == "BF16"
    assert weights.read("b.bias").shape == (64,)
    assert weights.read("a.weight").dtype == np.uint16


def test_norms_are_one_and_the_rest_is_small() -> None:
    weights = RandomWeights(PARAMS)
    assert np.array_equal(as_float(weights.read("norm.weight")), np.ones(37, np.float32))
    assert 0.015 < as_float(weights.read("a.bias")).std() < 0.025


@settings(max_examples=60)
@given(st.integers(0, 301), st.integers(0, 301))
def test_any_rows_equal_those_of_the_whole(a: int, b: int) -> None:
    start, stop = sorted((a, b))
    whole = RandomWeights(PARAMS).read("a.weight")
    assert np.array_equal(RandomWeights(PARAMS).read("a.weight", start, stop), whole[start:stop])


def test_order_and_company_do_not_matter() -> None:
    alone = RandomWeights([linear("other", ("b.weight", 64, 37))])
    first = RandomWeights(PARAMS)
    first.read("a.weight")
    assert np.array_equal(first.read("b.weight"), alone.read("b.weight"))


def test_seeds_and_names_give_different_numbers() -> None:
    zero, one = RandomWeights(PARAMS), RandomWeights(PARAMS, seed=1)
    assert not np.array_equal(zero.read("b.weight"), one.read("b.weight"))
    assert not np.array_equal(zero.read("b.weight"), zero.read("a.weight")[:64])


def test_distribution() -> None:
    sample = as_float(RandomWeights([linear("w", ("w", 1000, 1000))]).read("w")).astype(np.float64) / 0.02
    assert abs(sample.mean()) < 0.005
    assert abs(sample.std() - 1) < 0.005
    assert 4.0 < np.abs(sample).max() < 4.5
    # Shares within one, two and three standard deviations of a normal distribution.
    for bound, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs((np.abs(sample) < bound).mean() - share) < 0.005
    rows = sample[:, :100]
    correlation = np.corrcoef(rows.reshape(1000, -1)[:-1].ravel(), rows.reshape(1000, -1)[1:].ravel())[0, 1]
    assert abs(correlation) < 0.02


def test_known_values() -> None:
    """The stream is part of what a seed means: other numbers would be another model."""
    bits = RandomWeights([linear("w", ("model.embed_tokens.weight", 2, 4))]).read("model.embed_tokens.weight")
    assert bits.tolist() == [[48278, 48259, 15619, 48163], [47984, 15242, 15763, 15526]]
