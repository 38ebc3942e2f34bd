"""compressed-tensors checkpoints, and 8-bit floats with scales (including DeepSeek-V3's 128 x 128 blocks).

pack-quantized: `weight_packed` has numbers of 4 or 8 bits along the input features, each plus half its range;
`weight_shape` the shape, `weight_scale` [out, groups]; `weight_zero_point` is packed along the outputs.
int-quantized, naive-quantized: `weight` I8 with `weight_scale` for the tensor, for each output or for each group.
float-quantized, fp8: `weight` F8_E4M3 (4 exponent bits of bias 7, 3 of mantissa; 0x7F and 0xFF are NaN: arXiv
2209.05433) with scales for the tensor, for each output, for groups, or for blocks of both axes.
Input scales are for kernels that round activations, and are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from quire.quant.linear_codes import (
    F32,
    FLOATS,
    Array,
    Arrays,
    IntegerLinear,
    Integers,
    Stored,
    as_float32,
    check_shape,
    need,
    packed_format,
    unpack_bits,
)
from quire.records import dataclass
from quire.types import CheckpointError

PACKED_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
                "weight_global_scale")  # fmt: skip
SCALED_PARTS = ("weight", "weight_scale", "weight_scale_inv", "weight_zero_point", "input_scale", "input_zero_point",
                "activation_scale", "input_global_scale")  # fmt: skip


def _unpack_packed(arrays: Arrays, start: int, stop: int, *, bits: int, cols: int) -> Integers:
    codes = unpack_bits(arrays["weight_packed"][start:stop].T, bits).T[:, :cols]
    zeros: Array | int = 1 << (bits - 1)
    if "weight_zero_point" in arrays:
        zeros = unpack_bits(arrays["weight_zero_point"], bits)[start:stop]
    group_of = arrays["weight_g_idx"].astype(np.int64) if "weight_g_idx" in arrays else None
    if group_of is not None and not 0 <= group_of.min() <= group_of.max() < arrays["weight_scale"].shape[1]:
        raise CheckpointError("weight_g_idx: a group is out of range")
    return Integers(codes, arrays["weight_scale"][start:stop], zeros, group_of)


def packed_integers(infos: Mapping[str, Stored], shape: tuple[int, int], where: str) -> IntegerLinear:
    """Build a linear from stored arrays; `shape` is the content of weight_shape."""
    weight = need(infos, "weight_packed", ("I32",), where)
    scale = need(infos, "weight_scale", FLOATS, where)
    rows, cols = shape
    bits = next((bits for bits in (4, 8) if weight.shape == (rows, -(-cols * bits // 32))), None)
    if bits is None or min(shape) < 1:
        raise CheckpointError(
            f"{where}: weight_packed: {list(weight.shape)} words are not {list(shape)} of 4 or 8 bits"
        )
    if len(scale.shape) != 2 or scale.shape[0] != rows or not 1 <= scale.shape[1] <= cols:
        raise CheckpointError(
            f"{where}: weight_scale: shape {list(scale.shape)} for a weight of {list(shape)}"
        )
    groups, zeros = scale.shape[1], "weight_zero_point" in infos
    if zeros:
        found = need(infos, "weight_zero_point", ("I32",), where)
        check_shape(found, (-(-rows * bits // 32), groups), "weight_zero_point", where)
    ordered = "weight_g_idx" in infos
    if ordered:
        check_shape(need(infos, "weight_g_idx", ("I32", "I64"), where), (cols,), "weight_g_idx", where)
    packed = None if ordered else packed_format(bits, cols, groups, scale.dtype, zeros=zeros)
    unpack = partial(_unpack_packed, bits=bits, cols=cols)
    return IntegerLinear(f"int{bits} in groups of {-(-cols // groups)}", (rows, cols), packed, unpack)


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales [down, across] of a weight, each for `rows` outputs and `cols` input features."""

    rows: int
    cols: int

    def of(self, stored: Array, start: int, stop: int) -> Array:
        """The scales of rows [start, stop): [stop - start, across]."""
        matrix = stored.reshape(-1, stored.shape[1] if stored.ndim == 2 else 1)
        return np.ascontiguousarray(matrix[np.arange(start, stop) // self.rows])


def _scales(stored: Stored, shape: tuple[int, int], block: tuple[int, int] | None, where: str) -> Scales:
    """The layout of scales: per tensor, per output, per group of an output, or per block of both axes."""
    rows, cols = shape
    if stored.shape in {(), (1,), (1, 1)}:
        return Scales(rows, cols)
    if stored.shape in {(rows,), (rows, 1)}:
        return Scales(1, cols)
    if len(stored.shape) == 2 and stored.shape[0] == rows and block is None:
        across = stored.shape[1]
        if 1 <= across <= cols and cols % across == 0:
            return Scales(1, cols // across)
    if block is not None and stored.shape == (-(-rows // block[0]), -(-cols // block[1])):
        return Scales(*block)
    raise CheckpointError(
        f"{where}: scales of shape {list(stored.shape)} for a weight of {list(shape)}, blocks {block}"
    )


def _unpack_scaled(arrays: Arrays, start: int, stop: int, *, scales: Scales) -> Integers:
    zeros: Array | int = 0
    if "weight_zero_point" in arrays:
        zeros = scales.of(arrays["weight_zero_point"], start, stop).astype(np.int16)
    return Integers(arrays["weight"][start:stop], scales.of(arrays["weight_scale"], start, stop), zeros)


def scaled_integers(infos: Mapping[str, Stored], where: str) -> IntegerLinear:
    """Build a linear from stored arrays."""
    weight = need(infos, "weight", ("I8",), where)
    scale = need(infos, "weight_scale", FLOATS, where)
    shape = _matrix(weight, where)
    scales = _scales(scale, shape, None, where)
    zeros = "weight_zero_point" in infos
    if zeros:
        check_shape(need(infos, "weight_zero_point", ("I8",), where), scale.shape, "weight_zero_point", where)
    packed = None if zeros else packed_format(8, shape[1], shape[1] // scales.cols, scale.dtype, zeros=False)
    unpack = partial(_unpack_scaled, scales=scales)
    return IntegerLinear(f"int8 {_extent(scales, shape)}", shape, packed, unpack)


@dataclass(frozen=True, slots=True)
class ScaledFloats:
    """One linear of 8-bit floats (E4M3) with scales; `scale` is the name of their array."""

    label: str
    shape: tuple[int, int]
    scales: Scales
    scale: str

    def dequantize(self, arrays: Arrays, start: int, stop: int) -> F32:
        values = E4M3[arrays["weight"][start:stop]]
        scales = as_float32(self.scales.of(arrays[self.scale], start, stop))
        for group in range(scales.shape[1]):
            values[:, group * self.scales.cols : (group + 1) * self.scales.cols] *= scales[
                :, group : group + 1
            ]
        return values


def scaled_floats(infos: Mapping[str, Stored], where: str, block: tuple[int, int] | None) -> ScaledFloats:
    """Build a linear from stored arrays."""
    weight = need(infos, "weight", ("F8_E4M3",), where)
    name = "weight_scale_inv" if "weight_scale_inv" in infos else "weight_scale"
    shape = _matrix(weight, where)
    scales = _scales(need(infos, name, FLOATS, where), shape, block, where)
    return ScaledFloats(f"FP8 E4M3 {_extent(scales, shape)}", shape, scales, name)


def _matrix(weight: Stored, where: str) -> tuple[int, int]:
    if len(weight.shape) != 2 or min(weight.shape) < 1:
        raise CheckpointError(f"{where}: weight: shape {list(weight.shape)} is not a matrix")
    return weight.shape[0], weight.shape[1]


def _extent(scales: Scales, shape: tuple[int, int]) -> str:
    if scales.cols < shape[1]:
        return (
            f"in blocks of {scales.rows}x{scales.cols}" if scales.rows > 1 else f"in groups of {scales.cols}"
        )
    return "per output" if scales.rows == 1 else "per tensor"


def _e4m3() -> F32:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[codes & 127 == 127] = np.nan
    return np.where(codes >= 128, -values, values).astype(np.float32)


E4M3 = _e4m3()
