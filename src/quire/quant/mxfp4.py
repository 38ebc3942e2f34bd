"""MXFP4 in safetensors, as in gpt-oss's experts: OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1.

`P_blocks` U8 [experts, out features, blocks, 16] has two E2M1 numbers per byte, the lower nibble first; `P_scales` U8
[experts, out features, blocks] has the E8M0 exponent e of each block of 32 input features: a scale of 2^(e - 127), NaN
for 255. Every value is an integer times half of that scale, so it has a format in groups.

compressed-tensors (mxfp4-pack-quantized) stores single linears the same way: `weight_packed` U8 [out features, in
features / 2] and `weight_scale` U8 [out features, blocks].
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.program.formats import Groups, WeightFormat
from quire.quant.groups import GroupCodes
from quire.quant.linear_codes import F32, Array, Arrays, Stored, check_shape, need
from quire.records import dataclass
from quire.types import CheckpointError

MXFP4_PARTS = ("blocks", "scales")
_SCALES = ("U8", "F8_E8M0")
BLOCK = 32
# Twice the values of an E2M1 number, so that they are integers.
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_PACKED = WeightFormat("i8", Groups(BLOCK, "f32"))


@dataclass(frozen=True, slots=True)
class MXFP4:
    """A stack of weights, one per expert: `shape` [experts, out features, in features]. Rows are experts here."""

    shape: tuple[int, int, int]
    label: str = "MXFP4"
    packed: WeightFormat = _PACKED

    def dequantize(self, arrays: Arrays, start: int, stop: int) -> F32:
        """Experts [start, stop), float32 [experts, out features, in features]."""
        codes, scales = self._unpack(arrays, start, stop)
        values: F32 = codes.astype(np.float32) * scales[..., None]
        return values.reshape(stop - start, *self.shape[1:])

    def codes(self, arrays: Arrays, start: int, stop: int) -> GroupCodes:
        """Experts [start, stop) in the format `packed`, with their rows one after another."""
        codes, scales = self._unpack(arrays, start, stop)
        _, rows, cols = self.shape
        count = (stop - start) * rows
        return GroupCodes(
            codes.reshape(count, cols).view(np.uint8) + np.uint8(128), scales.reshape(count, -1)
        )

    def _unpack(self, arrays: Arrays, start: int, stop: int) -> tuple[Array, F32]:
        """Doubled values int8 [experts, out features, blocks, 32], halved scales [experts, out features, blocks]."""
        return _unpack(arrays["blocks"][start:stop]), half_scales(arrays["scales"][start:stop])


@dataclass(frozen=True, slots=True)
class MXFP4Linear:
    """One weight: `shape` [out features, in features]."""

    shape: tuple[int, int]
    label: str = "MXFP4"
    packed: WeightFormat = _PACKED

    def dequantize(self, arrays: Arrays, start: int, stop: int) -> F32:
        codes, scales = self._unpack(arrays, start, stop)
        values: F32 = codes.astype(np.float32) * scales[..., None]
        return values.reshape(stop - start, self.shape[1])

    def codes(self, arrays: Arrays, start: int, stop: int) -> GroupCodes:
        """Rows [start, stop) in the format `packed`."""
        codes, scales = self._unpack(arrays, start, stop)
        return GroupCodes(codes.reshape(stop - start, -1).view(np.uint8) + np.uint8(128), scales)

    def _unpack(self, arrays: Arrays, start: int, stop: int) -> tuple[Array, F32]:
        """Doubled values int8 [out features, blocks, 32], halved scales [out features, blocks]."""
        packed = arrays["weight_packed"][start:stop].reshape(stop - start, -1, BLOCK // 2)
        return _unpack(packed), half_scales(arrays["weight_scale"][start:stop])


def _unpack(packed: Array) -> Array:
    """Unpack bytes [..., blocks, 16] to doubled values int8 [..., blocks, 32]."""
    nibbles = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return E2M1[nibbles.reshape(*packed.shape[:-1], BLOCK)]


def half_scales(exponents: Array) -> F32:
    """2^(e - 128) for E8M0 exponents, float32; NaN for 255."""
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128).astype(np.float32)
    return np.where(exponents == 255, np.float32(np.nan), scales)


def mxfp4_linear(infos: Mapping[str, Stored], where: str) -> MXFP4Linear:
    """Build a weight from stored arrays."""
    packed, scales = need(infos, "weight_packed", ("U8",), where), need(infos, "weight_scale", _SCALES, where)
    if len(packed.shape) != 2 or packed.shape[1] % (BLOCK // 2):
        raise CheckpointError(
            f"{where}: weight_packed: shape {list(packed.shape)} is not [out features, blocks · {BLOCK // 2}]"
        )
    rows, blocks = packed.shape[0], packed.shape[1] // (BLOCK // 2)
    check_shape(scales, (rows, blocks), "weight_scale", where)
    return MXFP4Linear((rows, blocks * BLOCK))


def mxfp4(infos: Mapping[str, Stored], where: str) -> MXFP4:
    """Build a stack of weights from stored arrays."""
    blocks, scales = (need(infos, part, ("U8",), where) for part in MXFP4_PARTS)
    if len(blocks.shape) != 4 or blocks.shape[-1] != BLOCK // 2:
        raise CheckpointError(
            f"{where}: blocks: shape {list(blocks.shape)} is not [experts, out features, blocks, {BLOCK // 2}]"
        )
    check_shape(scales, blocks.shape[:-1], "scales", where)
    experts, rows, count, _ = blocks.shape
    return MXFP4((experts, rows, count * BLOCK))
