"""The NaN and infinity scan against numpy's own, bit pattern by bit pattern."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.loader.finite import first_nonfinite


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_every_16_bit_pattern() -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    for dtype, values, stored in (
        ("BF16", widened(patterns), patterns),
        ("F16", patterns.view(np.float16), patterns.view(np.float16)),
    ):
        for index in np.flatnonzero(~np.isfinite(values))[::37]:
            assert first_nonfinite(stored[index : index + 1], dtype) == 0
        finite = np.isfinite(values)
        assert first_nonfinite(stored[finite], dtype) is None
        assert first_nonfinite(stored, dtype) == int(np.argmin(finite))


@settings(max_examples=200)
@given(st.lists(st.floats(width=32), max_size=8))
def test_float32(values: list[float]) -> None:
    array = np.array(values, np.float32)
    bad = np.flatnonzero(~np.isfinite(array))
    assert first_nonfinite(array, "F32") == (int(bad[0]) if bad.size else None)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("index", [0, 2**17 - 1, 2**17, 299_999])
def test_position_in_a_large_matrix(dtype: type, value: float, index: int) -> None:
    matrix = np.full((300, 1000), -1.5, dtype)
    name = {"float32": "F32", "float16": "F16"}[np.dtype(dtype).name]
    assert first_nonfinite(matrix, name) is None
    matrix.reshape(-1)[index] = value
    assert first_nonfinite(matrix, name) == index


def test_largest_finite_values_pass() -> None:
    assert first_nonfinite(np.array([1, -1], np.float32) * np.finfo(np.float32).max, "F32") is None
    assert first_nonfinite(np.array([65504, -65504], np.float16), "F16") is None
    assert first_nonfinite(np.array([0x7F7F, 0xFF7F], np.uint16), "BF16") is None
