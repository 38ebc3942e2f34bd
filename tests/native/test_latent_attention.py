"""Latent attention natively: against its torch definition, with equal bits however it is cut, over stale memory."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention import Latent, pair, random_tokens
from helpers.long_context import (
    assert_nan_stays_with_its_sequence,
    assert_same_bits_however_cut,
    assert_unwritten_positions_are_seen,
)
from quire import _native
from quire.executor.base import F32, Limits
from quire.program.formats import DType
from quire.program.lower import NumberFormats
from quire.types import UnsupportedModelError

ISAS = _native.supported_isas()
KV: list[DType] = ["f32", "bf16", "f16"]
SHAPES = [
    Latent(4, 32, 8),
    Latent(16, 128, 32, q_rank=20),
    Latent(60, 24, 4),  # more heads than rows of a call
    Latent(3, 34, 6, interleaved=False),  # latent and key share a vector
    Latent(7, 80, 12),
]
TOLERANCE = {"f32": 3e-5, "bf16": 2e-2, "f16": 1e-3}  # of the largest output
LIMITS = Limits(max_tokens=160, max_rows=4, max_logit_rows=4, max_len=1600, num_blocks=280)


def mixed(shape: Latent, kv: DType, isa: str) -> tuple[F32, F32]:
    """Outputs of attention in a step with a decode, a chunk and a fresh prompt: native, torch."""
    left, right, stepper = pair(shape.program(NumberFormats("f32", kv)), LIMITS, isa)
    first, second, third = (stepper.add(random_tokens(seed, 300)) for seed in range(3))
    for counts in ({first: 130}, {first: 20, second: 100}, {first: 1, second: 61, third: 50}):
        size = stepper.fill(counts)
        for executor in (left, right):
            executor.run(size.num_tokens, size.num_rows, 0)
    return left.read("latents", size.num_tokens), right.read("latents", size.num_tokens)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_equals_torch(shape: Latent, kv: DType, isa: str) -> None:
    found, expected = mixed(shape, kv, isa)
    assert np.abs(expected).max() > 0.1
    assert np.abs(found - expected).max() <= TOLERANCE[kv] * np.abs(expected).max()


@pytest.mark.parametrize(
    "other",
    [Latent(4, 32, 8, interleaved=False), Latent(4, 32, 8, sharpness=2.1)],
    ids=["another rotation", "another scale"],
)
def test_each_fact_of_the_op_matters(other: Latent) -> None:
    """Negative control: the comparison above would see a rotated part or a scale that is left out."""
    left, right = (mixed(shape, "f32", "")[0] for shape in (SHAPES[0], other))
    assert np.abs(left - right).max() > 20 * TOLERANCE["f32"] * np.abs(left).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("shape", "kv"), [(SHAPES[3], "f32"), (SHAPES[4], "bf16"), (SHAPES[3], "f16")], ids=str
)
def test_long_context_on_many_threads(shape: Latent, kv: DType, isa: str) -> None:
    assert_same_bits_however_cut(shape, kv, isa)


@pytest.mark.parametrize("kv", KV)
def test_a_position_that_was_never_written_is_seen(kv: DType) -> None:
    assert_unwritten_positions_are_seen(SHAPES[0], kv)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV)
def test_numbers_that_are_not_finite_stay_with_their_sequence(kv: DType, isa: str) -> None:
    assert_nan_stays_with_its_sequence(SHAPES[0], kv, isa)


def test_an_int8_cache_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"kv_cache_dtype = int8.*latent"):
        SHAPES[0].program(NumberFormats("f32", "i8"))
