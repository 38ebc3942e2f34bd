"""Convert numbers between float formats, and float32 to the blocks of Q8_0."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.quant.linear_codes import F32, as_float32

Array = npt.NDArray[Any]
FloatsOrBits = Array  # float32, or the bits of bfloat16 as uint16


def floats(numbers: FloatsOrBits) -> F32:
    """The same numbers in float32."""
    return as_float32(numbers) if numbers.dtype == np.uint16 else numbers.view(np.float32)


def to_float32(values: Array, dtype: str) -> F32:
    """Convert "F32", "F16" or "BF16" (uint16) numbers to float32."""
    return values.view(np.float32) if dtype == "F32" else as_float32(values)


def from_float32(values: F32, dtype: str) -> Array:
    """Convert to "F32", "F16" or "BF16" (as uint16), rounded to nearest, ties to even. NaN stays NaN."""
    match dtype:
        case "F32":
            return values
        case "F16":
            return values.astype(np.float16)
        case "BF16":
            bits = values.view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))
        case _:
            raise ValueError(f"{dtype} is no float format")


def to_q8_0(values: F32) -> npt.NDArray[np.uint8]:
    """Convert [rows, columns] to blocks [rows, columns / 32 · 34]: a float16 scale max|w| / 127, then 32 int8.

    Codes are the quotients by the unrounded scale, rounded to nearest, ties away from zero.
    """
    rows = len(values)
    groups = values.reshape(-1, 32)
    scale = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    steps = groups * inverse
    codes = np.trunc(steps + np.copysign(np.float32(0.5), steps)).astype(np.int8)
    blocks = np.concatenate([scale.astype("<f2").view(np.uint8), codes.view(np.uint8)], axis=1)
    return blocks.reshape(rows, -1)


def to_e4m3(values: F32) -> npt.NDArray[np.uint8]:
    """Round to E4M3 codes, to nearest, ties to even; beyond 448 to 448. NaN becomes 0x7F (arXiv 2209.05433)."""
    size = np.nan_to_num(np.minimum(np.abs(values), np.float32(448)))
    exponent = np.where(
        size < np.float32(2.0**-6), -6, np.frexp(size)[1] - 1
    )  # below 2^-6 they are subnormal
    steps = np.rint(np.ldexp(size, 3 - exponent))  # 8 to 16 of an eighth; fewer when subnormal
    codes = (steps + 8.0 * (exponent + 6)).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)
