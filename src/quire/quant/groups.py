"""Weights in groups (program.formats.Groups): checks, values, and rounding to nearest.

The native packing computes these numpy definitions bit for bit, on every instruction set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.program.formats import SUPER_GROUPS, Groups
from quire.program.tensors import Param
from quire.records import dataclass

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

# Shares of the widest scale that rounding to 4 bits or fewer tries: clipping the largest value of a group slightly
# costs less than a coarser step for all others (5 % of the error for normally distributed weights).
SHARES = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79)
TINY = np.float32(2.0**-100)  # a smaller scale is 0: its inverse would overflow
_STORED = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32, "u8": np.uint8, "f16*u8": np.uint8}
_LANES = 16


@dataclass(frozen=True, slots=True)
class GroupCodes:
    """Rows of a weight in groups, for Executor.put_codes; G = groups per row.

    codes: uint8 [rows, cols] of the format's bits.
    scales: [rows, G] of float16, uint16 (bfloat16 bits) or float32; uint8 for "f16*u8".
    offsets: None; uint8 zero points [rows, G]; or like scales.
    factors: for "f16*u8" float16 [rows, ceil(G / 8), 1], or 2 with offsets: scale first; else None.
    """

    codes: U8
    scales: Array
    offsets: Array | None = None
    factors: npt.NDArray[np.float16] | None = None


def check_codes(param: Param, row_offset: int, given: GroupCodes) -> None:
    """Raise ValueError, naming the parameter, unless `given` are rows of it in its format."""
    groups = param.groups
    if groups is None:
        raise ValueError(f"{param.name}: {param.format} is not stored in groups")
    rows, count = len(given.codes), groups.count(param.cols)
    if row_offset < 0 or row_offset + rows > param.rows:
        raise ValueError(f"{param.name}: rows {row_offset}:{row_offset + rows} of {param.rows}")
    factors = (rows, -(-count // SUPER_GROUPS), 1 + (groups.offsets != "none"))
    wanted: dict[str, tuple[Array | None, tuple[int, ...] | None, Any]] = {
        "codes": (given.codes, (rows, param.cols), np.uint8),
        "scales": (given.scales, (rows, count), _STORED[groups.scales]),
        "offsets": (
            given.offsets,
            (rows, count) if groups.offsets != "none" else None,
            _STORED.get(groups.offsets),
        ),
        "factors": (given.factors, factors if groups.two_level else None, np.float16),
    }
    for name, (array, shape, dtype) in wanted.items():
        if (array is None) != (shape is None):
            raise ValueError(f"{param.name}: {name} {'missing' if array is None else 'not expected'}")
        if array is None:
            continue
        if array.shape != shape or array.dtype != dtype:
            found = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"{param.name}: {name} are {found}, not {np.dtype(dtype)} {list(shape or ())}")
    most = (1 << param.code_bits) - 1
    if most < np.iinfo(np.uint8).max and rows and given.codes.max() > most:
        raise ValueError(f"{param.name}: a code of {param.code_bits} bits is above {most}")
    for name, array, kind in (
        ("scales", given.scales, groups.scales),
        ("offsets", given.offsets, groups.offsets),
        ("factors", given.factors, "f16"),
    ):
        if array is not None and array.dtype != np.uint8 and not np.isfinite(_floats(array, kind)).all():
            raise ValueError(f"{param.name}: {name} contain NaN or infinity")


def dequantize(groups: Groups, bits: int, given: GroupCodes) -> F32:
    """Convert codes to float32 [rows, cols]. Only the addition of a float offset rounds."""
    codes = _split(given.codes.astype(np.float32), groups.size)
    scales = _level(given, 0, groups.scales)[..., None]
    if groups.offsets == "none":
        values: Array = scales * (codes - np.float32(1 << (bits - 1)))
    elif groups.offsets == "u8":
        assert given.offsets is not None
        values = scales * (codes - given.offsets.astype(np.float32)[..., None])
    else:
        values = scales * codes + _level(given, 1, groups.offsets)[..., None]
    if groups.rotated:
        values = rotate(values) * input_share(groups.size)
    return _join(values, given.codes.shape[1])


def quantize(weights: F32, groups: Groups, bits: int) -> GroupCodes:
    """Round float32 weights [rows, cols] to nearest, per group, with the scale of least squared error.

    Symmetric: the value of largest magnitude becomes the lowest code, times each of SHARES (8 bits: the first only).
    With zero points: the range of the group and 0 is divided into equal steps, again times each of SHARES.
    Raises ValueError for formats that only quantized checkpoints have.
    """
    if groups.two_level or groups.offsets not in {"none", "u8"}:
        raise ValueError(f"floats are not rounded to scales {groups.scales}, offsets {groups.offsets}")
    w = _split(weights, groups.size)
    if groups.rotated:
        w = rotate(w) * weight_share(groups.size)
    lowest, highest = w.min(-1), w.max(-1)
    best = np.full(lowest.shape, np.inf, np.float32)
    scales, zeros = np.zeros_like(lowest), np.zeros_like(lowest)
    codes = np.zeros(w.shape, np.uint8)
    for share in SHARES if bits <= 4 else SHARES[:1]:
        scale, inverse, zero = _steps(lowest, highest, groups, bits, np.float32(share))
        steps = np.rint(w * inverse[..., None]) + zero[..., None]
        steps = np.clip(steps, 0, (1 << bits) - 1).astype(np.float32)
        far = w - scale[..., None] * (steps - zero[..., None])
        error = _sum_of_squares(far)
        better = error < best
        best = np.where(better, error, best)
        scales, zeros = np.where(better, scale, scales), np.where(better, zero, zeros)
        codes = np.where(better[..., None], steps, codes).astype(np.uint8)
    stored = zeros.astype(np.uint8) if groups.offsets == "u8" else None
    return GroupCodes(_join(codes, weights.shape[1]), _store(scales, groups.scales), stored)


def rotate(x: F32) -> F32:
    """Multiply the last axis, a group, by the Hadamard matrix of +1 and -1.

    Numbers i and i + d become their sum and their difference, for d = 1, 2, 4, … half the group. The order determines
    the rounding.
    """
    size, d = x.shape[-1], 1
    while d < size:
        pairs = x.reshape(*x.shape[:-1], -1, 2, d)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
        d *= 2
    return x


def weight_share(size: int) -> np.float32:
    """The factor on rotated weights before rounding; times input_share it is 1 / size."""
    return np.float32(2.0 ** -((size.bit_length() - 1) // 2))


def input_share(size: int) -> np.float32:
    """The factor on rotated inputs before rounding, and on twice-rotated weights to restore them."""
    return np.float32(1 / size) / weight_share(size)


def _steps(lowest: F32, highest: F32, groups: Groups, bits: int, share: np.float32) -> tuple[F32, F32, F32]:
    """Stored scale, its inverse, and zero point of each group."""
    if groups.offsets == "none":
        half = np.float32(1 << (bits - 1))
        top = np.where(highest >= -lowest, highest, lowest)
        scale, zero = top * (share / -half), np.full_like(lowest, half)
    else:
        lowest, highest = np.minimum(lowest, 0), np.maximum(highest, 0)
        scale, zero = (highest - lowest) * (share / np.float32((1 << bits) - 1)), np.zeros_like(lowest)
    scale = _floats(_store(scale.astype(np.float32), groups.scales), groups.scales)
    scale = np.where(np.abs(scale) < TINY, np.float32(0), scale)
    inverse = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=inverse, where=scale != 0)
    if groups.offsets == "u8":
        zero = np.clip(np.rint(-lowest * share * inverse), 0, (1 << bits) - 1).astype(np.float32)
    return scale, inverse, zero


def _sum_of_squares(x: F32) -> F32:
    """Sum over the last axis as the kernels do: sixteen running sums, then halves are added until one is left."""
    lanes: Array = x.reshape(*x.shape[:-1], -1, _LANES)
    sums: Array = np.zeros((*x.shape[:-1], _LANES), np.float32)
    for i in range(lanes.shape[-2]):
        with np.errstate(over="ignore"):  # infinite: no share of the scale works, and the group becomes zeros
            sums = sums + lanes[..., i, :] * lanes[..., i, :]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def _level(given: GroupCodes, which: int, kind: str) -> F32:
    """Scales (0) or float offsets (1) [rows, G] as float32."""
    array = given.offsets if which else given.scales
    assert array is not None
    if kind != "f16*u8":
        return _floats(array, kind)
    assert given.factors is not None
    factors = np.repeat(given.factors[..., which].astype(np.float32), SUPER_GROUPS, 1)[:, : array.shape[1]]
    return factors * array.astype(np.float32) * np.float32(-1 if which else 1)


def _floats(stored: Array, kind: str) -> F32:
    if kind == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _store(values: F32, kind: str) -> Array:
    """Round float32 to a float kind, ties to even; float16 is clipped to its largest number."""
    if kind == "f16":
        return np.clip(values, -65504, 65504).astype(np.float16)
    if kind == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values


def _split(x: Array, size: int) -> Array:
    """[rows, cols] -> [rows, G, size], the last group filled with zeros."""
    rows, cols = x.shape
    padded = np.zeros((rows, -(-cols // size) * size), x.dtype)
    padded[:, :cols] = x
    return padded.reshape(rows, -1, size)


def _join(x: Array, cols: int) -> Array:
    return np.ascontiguousarray(x.reshape(x.shape[0], -1)[:, :cols])
