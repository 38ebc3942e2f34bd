"""GPTQ (arXiv 2210.17323) and AWQ (2306.00978) in their common checkpoint formats.

GPTQ: `qweight` packs the input features of an output along rows, `qzeros` the outputs' zero points along columns,
minus one in checkpoint format "gptq" (v1) and unchanged in "gptq_v2"; `g_idx` is the group of each input feature, in
the order of activations with `desc_act`.

AWQ ("gemm"): `qweight` packs eight outputs of an input feature into a word, in the order 0 2 4 6 1 3 5 7; so do zero
points.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from quire.program.formats import WeightFormat
from quire.quant.groups import GroupCodes
from quire.quant.linear_codes import (
    F32,
    FLOATS,
    Array,
    Arrays,
    IntegerLinear,
    Integers,
    Stored,
    check_shape,
    need,
    pack_bits,
    packed_format,
    unpack_bits,
)
from quire.records import dataclass
from quire.types import CheckpointError

GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")
AWQ_PARTS = ("qweight", "qzeros", "scales")
_MOST_ZERO = 255
_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the nibble of a word for output j of eight


@dataclass(frozen=True, slots=True)
class GPTQ:
    """One linear. `zero_offset` is added to the stored zero points."""

    label: str
    shape: tuple[int, int]
    bits: int
    groups: int
    zero_offset: int
    packed: WeightFormat | None

    def dequantize(self, arrays: Arrays, start: int, stop: int) -> F32:
        group_of = arrays["g_idx"].astype(np.int64) if "g_idx" in arrays else None
        if group_of is not None:
            if group_of.size and not 0 <= group_of.min() <= group_of.max() < self.groups:
                raise CheckpointError(f"g_idx: a group is not in [0, {self.groups})")
            if np.array_equal(group_of, self._runs()):
                group_of = None
        return self._unpack(arrays, start, stop, group_of).values()

    def codes(self, arrays: Arrays, start: int, stop: int) -> GroupCodes:
        assert self.packed is not None
        if "g_idx" in arrays and not np.array_equal(arrays["g_idx"], self._runs()):
            raise CheckpointError(
                "g_idx: input features are in the order of activations, but desc_act is false"
            )
        found = self._unpack(arrays, start, stop, None)
        if np.max(found.zeros) > _MOST_ZERO:
            raise CheckpointError("qzeros: a zero point of 256, but sym is true")
        return found.grouped(self.packed)

    def _runs(self) -> npt.NDArray[np.int64]:
        return np.arange(self.shape[1]) // -(-self.shape[1] // self.groups)

    def _unpack(
        self, arrays: Arrays, start: int, stop: int, group_of: npt.NDArray[np.int64] | None
    ) -> Integers:
        codes = unpack_bits(arrays["qweight"][:, start:stop], self.bits).T
        zeros = unpack_bits(arrays["qzeros"].T, self.bits)[start:stop].astype(np.int16) + self.zero_offset
        return Integers(codes, np.ascontiguousarray(arrays["scales"][:, start:stop].T), zeros, group_of)


def bits_of(infos: Mapping[str, Stored], where: str) -> int:
    """The bits of a linear by its shapes: zero points have as many bits as codes, and one for each output."""
    weight, zeros = need(infos, "qweight", ("I32",), where), need(infos, "qzeros", ("I32",), where)
    for bits in (2, 3, 4, 8):
        if len(weight.shape) == len(zeros.shape) == 2 and zeros.shape[1] == weight.shape[1] * bits // 32:
            return bits
    raise CheckpointError(f"{where}: qzeros: shape {list(zeros.shape)} is not that of 2, 3, 4 or 8 bits")


def gptq(
    infos: Mapping[str, Stored],
    where: str,
    *,
    bits: int,
    zero_offset: int,
    ordered: bool,
    symmetric: bool = False,
) -> GPTQ:
    """Build a linear from stored arrays; `ordered` if groups follow activations (desc_act), `symmetric` if all zero
    points are the middle.
    """
    weight = need(infos, "qweight", ("I32",), where)
    scales = need(infos, "scales", FLOATS, where)
    zeros = need(infos, "qzeros", ("I32",), where)
    if len(weight.shape) != 2 or len(scales.shape) != 2:
        raise CheckpointError(f"{where}: qweight and scales are not matrices")
    cols, rows, groups = weight.shape[0] * 32 // bits, weight.shape[1], scales.shape[0]
    if not 1 <= groups <= cols or weight.shape[0] * 32 % bits:
        raise CheckpointError(f"{where}: {groups} groups of {cols} input features")
    check_shape(scales, (groups, rows), "scales", where)
    check_shape(zeros, (groups, rows * bits // 32), "qzeros", where)
    if "g_idx" in infos:
        check_shape(need(infos, "g_idx", ("I32", "I64"), where), (cols,), "g_idx", where)
    packed = None if ordered and groups > 1 else packed_format(bits, cols, groups, scales.dtype, zeros=True)
    if bits == 8 and zero_offset and not symmetric:
        packed = None  # a zero point of 255 + 1 has no byte
    order = ", in the order of activations" if ordered and groups > 1 else ""
    label = f"GPTQ {bits}-bit in groups of {-(-cols // groups)}{order}"
    return GPTQ(label, (rows, cols), bits, groups, zero_offset, packed)


def pack_gptq(codes: Array, scales: Array, zeros: Array, bits: int, *, v2: bool = False) -> dict[str, Array]:
    """The arrays of a linear in checkpoint format "gptq", or "gptq_v2", which alone can store a zero point of 0.

    codes [out, in], scales float16 and zeros [out, groups].

    Raises ValueError if its input features or outputs do not fill words of 32 bits.
    """
    cols = codes.shape[1]
    stored = zeros if v2 else (zeros.astype(np.int16) - 1) & ((1 << bits) - 1)
    return {
        "qweight": pack_bits(codes.T, bits),
        "qzeros": np.ascontiguousarray(pack_bits(stored.astype(np.uint8), bits).T),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": (np.arange(cols) // (cols // scales.shape[1])).astype(np.int32),
    }


def pack_awq(codes: Array, scales: Array, zeros: Array) -> dict[str, Array]:
    """The arrays of a linear of 4 bits in the "gemm" version: codes [out, in], scales float16 and zeros [out, groups].

    Raises ValueError unless the outputs are a multiple of 8.
    """
    return {
        "qweight": _pack_outputs(codes),
        "qzeros": _pack_outputs(zeros),
        "scales": np.ascontiguousarray(scales.T),
    }


def _pack_outputs(codes: Array) -> npt.NDArray[np.int32]:
    """Codes [out, n] as words [n, out / 8]."""
    rows, cols = codes.shape
    ordered = np.empty((rows // 8, 8, cols), np.uint8)
    ordered[:, _PLACE] = codes.reshape(-1, 8, cols)
    return np.ascontiguousarray(pack_bits(ordered.reshape(rows, cols), 4).T)


def _unpack_awq(arrays: Arrays, start: int, stop: int) -> Integers:
    codes = _outputs(arrays["qweight"], start, stop)
    zeros = _outputs(arrays["qzeros"], start, stop)
    return Integers(codes, np.ascontiguousarray(arrays["scales"][:, start:stop].T), zeros)


def _outputs(words: Array, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """Outputs [start, stop) of words [n, out / 8], as [stop - start, n]."""
    first, last = start // 8, -(-stop // 8)
    part = np.ascontiguousarray(words[:, first:last]).view(np.uint32)
    nibbles = ((part[:, :, None] >> (4 * _PLACE).astype(np.uint32)) & np.uint32(15)).astype(np.uint8)
    flat = nibbles.reshape(len(words), -1)[:, start - 8 * first : stop - 8 * first]
    return np.ascontiguousarray(flat.T)


def awq(infos: Mapping[str, Stored], where: str) -> IntegerLinear:
    """Build a linear of the "gemm" version with 4 bits from stored arrays."""
    weight = need(infos, "qweight", ("I32",), where)
    scales = need(infos, "scales", FLOATS, where)
    zeros = need(infos, "qzeros", ("I32",), where)
    if len(weight.shape) != 2 or len(scales.shape) != 2:
        raise CheckpointError(f"{where}: qweight and scales are not matrices")
    cols, rows, groups = weight.shape[0], weight.shape[1] * 8, scales.shape[0]
    if not 1 <= groups <= cols or cols % groups:
        raise CheckpointError(f"{where}: {groups} groups of {cols} input features")
    check_shape(scales, (groups, rows), "scales", where)
    check_shape(zeros, (groups, rows // 8), "qzeros", where)
    packed = packed_format(4, cols, groups, scales.dtype, zeros=True)
    return IntegerLinear(f"AWQ 4-bit in groups of {cols // groups}", (rows, cols), packed, _unpack_awq)
