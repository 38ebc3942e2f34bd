"""HQQ (Badri & Shaji 2023, mobiusml.github.io/hqq_blog) in safetensors: codes with float zero points.

    value = (code - zero) · scale

`W_q` has the codes of the weight reshaped to [groups, group size] (axis 1: neighbouring input features) or [group size,
groups] (axis 0), packed along the first axis in equal parts: the first part in the highest bits of a byte; with 3 bits,
ten per word of 32. `scale` and `zero` have one number per group; `shape`, `nbits`, `axis` are small tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.program.formats import GROUP_SIZES, Groups, WeightFormat
from quire.quant.groups import GroupCodes
from quire.quant.linear_codes import (
    F32,
    FLOATS,
    Array,
    Arrays,
    Stored,
    as_float32,
    check_shape,
    code_format,
    need,
)
from quire.records import dataclass
from quire.types import CheckpointError

SETTINGS = ("shape", "nbits", "axis", "quant_scale", "quant_zero")  # the settings that are read
HQQ_PARTS = (
    "W_q", "scale", "zero", *SETTINGS, "group_size", "packing", "unpack_view_dtype", "view_as_float", "compute_dtype",
    "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
HQQ_BITS = (1, 2, 3, 4, 8)
_PER_WORD = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}


@dataclass(frozen=True, slots=True)
class HQQ:
    """One linear. `groups` of `size` values; `packed` is set if groups are runs of input features."""

    label: str
    shape: tuple[int, int]
    bits: int
    axis: int
    groups: int
    packed: WeightFormat | None

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1] // self.groups

    def dequantize(self, arrays: Arrays, start: int, stop: int) -> F32:
        cols = self.shape[1]
        flat = np.arange(start * cols, stop * cols)
        if self.axis == 1:
            group, place = np.divmod(flat, self.size)
            codes = self._codes(arrays["W_q"], group, place)
        else:
            place, group = np.divmod(flat, self.groups)
            codes = self._codes(arrays["W_q"], place, group)
        scales, zeros = (as_float32(arrays[part].reshape(-1))[group] for part in ("scale", "zero"))
        values: F32 = (codes.astype(np.float32) - zeros) * scales
        return values.reshape(stop - start, cols)

    def codes(self, arrays: Arrays, start: int, stop: int) -> GroupCodes:
        """Unchanged scales in float32; offsets are -scale · zero, rounded once."""
        assert self.packed is not None
        assert self.packed.groups is not None
        rows, a_row = stop - start, self.shape[1] // self.size
        group = np.arange(start * a_row, stop * a_row)
        codes = self._codes(arrays["W_q"], group[:, None], np.arange(self.size)[None])
        scales, zeros = (as_float32(arrays[part].reshape(-1)[group]) for part in ("scale", "zero"))
        times = self.size // self.packed.groups.size
        scales, offsets = (np.repeat(x, times).reshape(rows, -1) for x in (scales, -(scales * zeros)))
        return GroupCodes(np.ascontiguousarray(codes.reshape(rows, -1)), scales, offsets)

    def _codes(self, packed: Array, row: Array, col: Array) -> Array:
        """Codes at positions of the matrix that was packed along its first axis, uint8."""
        per = _PER_WORD[self.bits]
        kind: type[np.uint32] | type[np.uint8] = np.uint32 if self.bits == 3 else np.uint8
        count = self.groups if self.axis == 1 else self.size
        step = -(-count // per)
        words: Array = np.ascontiguousarray(packed).reshape(-1).view(kind).reshape(step, -1)
        part, at = np.divmod(row, step)
        shift = ((per - 1 - part) * self.bits).astype(kind)
        found: Array = ((words[at, col] >> shift) & kind((1 << self.bits) - 1)).astype(np.uint8)
        return found


def hqq(infos: Mapping[str, Stored], settings: Mapping[str, Array], where: str) -> HQQ:
    """Build a linear from stored arrays; `settings` are the contents of the SETTINGS that exist."""
    for part in SETTINGS[:3]:
        if part not in settings or settings[part].dtype.kind not in "iu":
            raise CheckpointError(f"{where}: {part}: is missing, or has no integers")
    if any(settings[part].any() for part in SETTINGS[3:] if part in settings):
        raise CheckpointError(f"{where}: quant_scale, quant_zero: quantized scales are not supported")
    shape, bits, axis = (settings[part].reshape(-1) for part in SETTINGS[:3])
    if len(shape) != 2 or bits.size != 1 or axis.size != 1 or not all(1 <= size < 2**24 for size in shape):
        raise CheckpointError(f"{where}: shape, nbits, axis: {shape}, {bits}, {axis}")
    if int(bits[0]) not in HQQ_BITS or int(axis[0]) not in {0, 1}:
        raise CheckpointError(
            f"{where}: nbits {bits[0]}, axis {axis[0]}: HQQ has 1, 2, 3, 4 or 8, and 0 or 1"
        )
    return _checked(infos, (int(shape[0]), int(shape[1])), int(bits[0]), int(axis[0]), where)


def _checked(infos: Mapping[str, Stored], shape: tuple[int, int], bits: int, axis: int, where: str) -> HQQ:
    words = need(infos, "W_q", ("U8", "I32", *FLOATS), where)
    scale, zero = (need(infos, part, FLOATS, where) for part in ("scale", "zero"))
    if len(scale.shape) != 2 or scale.shape[axis] != 1:
        raise CheckpointError(f"{where}: scale: shape {list(scale.shape)} for groups along axis {axis}")
    check_shape(zero, scale.shape, "zero", where)
    count, values = scale.shape[1 - axis], shape[0] * shape[1]
    if count < 1 or values % count:
        raise CheckpointError(f"{where}: {count} groups of {values} weights")
    size, per = values // count, _PER_WORD[bits]
    along, across = (count, size) if axis == 1 else (size, count)
    nbytes = -(-along // per) * across * (4 if bits == 3 else 1)
    stored = words.shape[0] * words.shape[1] if len(words.shape) == 2 else 0
    stored *= {"U8": 1, "I32": 4, "F32": 4}.get(words.dtype, 2)
    if stored != nbytes:
        raise CheckpointError(
            f"{where}: W_q: {stored} bytes, but {bits} bits of {list(shape)} in {count} groups are {nbytes}"
        )
    fitting = [s for s in GROUP_SIZES if axis == 1 and shape[1] % size == 0 and size % s == 0]
    form = Groups(fitting[-1], "f32", "f32") if fitting else None
    packed = code_format(bits, form) if form else None
    order = "" if axis == 1 else ", along outputs"
    return HQQ(f"HQQ {bits}-bit in groups of {size}{order}", shape, bits, axis, count, packed)
