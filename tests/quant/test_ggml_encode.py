"""Rounding to GGUF's types: llama.cpp's own decoder reads the blocks, and errors are those that the types allow."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from quire.quant.ggml import READ_TYPES, dequantize
from quire.quant.ggml_encode import ENCODED_TYPES, encode

F32 = npt.NDArray[np.float32]
# Root mean square error of normally distributed numbers, relative to theirs, with a tenth of room.
MOST = {"Q8_0": 0.006, "Q4_0": 0.09, "Q5_0": 0.045, "Q2_K": 0.31, "Q3_K": 0.16, "Q4_K": 0.08, "Q5_K": 0.04,
        "Q6_K": 0.02, "IQ4_NL": 0.083, "IQ4_XS": 0.084}  # fmt: skip


def numbers() -> F32:
    found = np.random.default_rng(0).normal(0, 0.02, (16, 512)).astype(np.float32)
    found[3], found[5, :256], found[6, 7] = 0, 0, 1.5
    return found


def distance(values: F32, found: F32, importance: F32 | float = 1.0) -> float:
    return float(
        np.sqrt((importance * np.square(values - found)).sum() / (importance * np.square(values)).sum())
    )


@pytest.mark.parametrize("kind", ENCODED_TYPES)
def test_blocks_decode_to_near_numbers(kind: str) -> None:
    values = numbers()
    blocks = encode(values, kind)
    found = dequantize(blocks, READ_TYPES[kind])
    theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(found, theirs)
    assert distance(np.delete(values, 6, 0), np.delete(found, 6, 0)) < MOST[kind]
    assert (found[3] == 0).all()
    assert np.isfinite(found).all()


@pytest.mark.parametrize("kind", [kind for kind in ENCODED_TYPES if kind != "Q8_0"])
def test_important_columns_lose_less(kind: str) -> None:
    values = numbers()
    importance = np.exp(np.random.default_rng(1).normal(0, 1.5, 512)).astype(np.float32)
    plain, weighed = (
        dequantize(encode(values, kind, given), READ_TYPES[kind]) for given in (None, importance)
    )
    assert distance(values, weighed, importance) < 0.98 * distance(values, plain, importance)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0"])
def test_no_type_is_worse_than_the_plain_rounding_of_the_gguf_package(kind: str) -> None:
    values = numbers()
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    theirs = gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType[kind])
    assert (
        distance(values, dequantize(encode(values, kind), READ_TYPES[kind]))
        <= distance(values, theirs) * 1.001
    )


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="96 columns are not whole blocks of 256, as Q4_K needs"):
        encode(np.zeros((2, 96), np.float32), "Q4_K")
