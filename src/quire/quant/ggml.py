"""The tensor types of GGUF files: sizes of all types, and decoding of the supported ones.

A quantized row is a sequence of blocks of fixed size. Whatever its packing, every supported type means the same:
integers ("codes") in groups of 16 or 32 that share a scale and possibly an offset,

    value = scale · code (+ offset),    all three float32, product and sum rounded once each,

so one function per type unpacks codes, scales and offsets, and one common function multiplies. Every type also has an
exact format in groups (program.formats) for the kernels: `PACKED`. The
packings are those of ggml (https://github.com/ggml-org/ggml, docs/gguf.md and ggml-common.h): nibbles of the
first half of a group below those of its second half, little-endian numbers, float16 scales.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quire.program.formats import CODE_BITS, CODES, Groups, OffsetKind, ScaleKind, WeightFormat
from quire.quant.groups import GroupCodes
from quire.records import dataclass

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
F32 = npt.NDArray[np.float32]

_PIECE_VALUES = 2**16  # unpacked at a time, so that codes, scales and values of a piece stay in the cache


@dataclass(frozen=True, slots=True)
class UnpackedGroups:
    """Unpacked blocks: `codes` int8 [n, groups, size], `scales` and `offsets` float32 [n, groups]."""

    codes: I8
    scales: F32
    offsets: F32 | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type: `values` numbers are stored in `nbytes` bytes. `unpack` is None for plain numbers and for types
    that are known by name only; `group` values share a scale.
    """

    name: str
    values: int
    nbytes: int
    unpack: Callable[[U8], UnpackedGroups] | None = None
    group: int = 0


def dequantize(blocks: U8, kind: BlockType) -> F32:
    """Decode `blocks` [rows, bytes per row] to float32 [rows, columns].

    Equal to the definition above bit for bit; needs a few hundred KiB in addition to the result.
    """
    assert kind.unpack is not None
    rows, row_bytes = blocks.shape
    flat = np.ascontiguousarray(blocks).reshape(-1, kind.nbytes)
    out = np.empty((len(flat), kind.values), np.float32)
    step = max(_PIECE_VALUES // kind.values, 1)
    for start in range(0, len(flat), step):
        groups = kind.unpack(flat[start : start + step])
        piece = out[start : start + step].reshape(groups.codes.shape)
        np.multiply(groups.codes, groups.scales[..., None], out=piece, dtype=np.float32)
        if groups.offsets is not None:
            piece += groups.offsets[..., None]
    return out.reshape(rows, row_bytes // kind.nbytes * kind.values)


def group_codes(blocks: U8, kind: BlockType) -> GroupCodes:
    """Convert whole rows of blocks [rows, bytes per row] to the format PACKED[kind.name], exactly."""
    assert kind.unpack is not None
    form, rows = PACKED[kind.name], len(blocks)
    assert form.groups is not None
    flat = np.ascontiguousarray(blocks).reshape(-1, kind.nbytes)
    groups = kind.unpack(flat)
    if form.groups.two_level:
        factors, scales, mins = _two_levels(flat, kind)
        return GroupCodes(
            groups.codes.reshape(rows, -1).view(np.uint8), scales.reshape(rows, -1), mins.reshape(rows, -1),
            factors.reshape(rows, -1, 2),
        )  # fmt: skip
    stored = np.float16 if form.groups.scales == "f16" else np.float32
    scales = groups.scales.reshape(rows, -1).astype(stored)
    if groups.offsets is not None:
        offsets = groups.offsets.reshape(rows, -1).astype(stored)
        return GroupCodes(groups.codes.reshape(rows, -1).view(np.uint8), scales, offsets)
    middle = np.uint8(1 << (CODE_BITS[form.dtype] - 1))
    return GroupCodes(groups.codes.reshape(rows, -1).view(np.uint8) + middle, scales)


def _two_levels(b: U8, kind: BlockType) -> tuple[npt.NDArray[np.float16], U8, U8]:
    """Factors [blocks · super-groups, 2] and each group's scale and minimum [blocks, groups]."""
    if kind.name == "Q2_K":  # sixteen groups: two super-groups with the same factors
        both = np.ascontiguousarray(b[:, 80:84]).view("<f2")
        return np.repeat(both, 2, axis=0), b[:, :16] & np.uint8(15), b[:, :16] >> np.uint8(4)
    return np.ascontiguousarray(b[:, :4]).view("<f2"), *_scales_and_mins(b[:, 4:16])


def _half(blocks: U8, at: int) -> F32:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    bits = np.ascontiguousarray(blocks[:, at : at + 2])
    return bits.view("<f2").astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """[n, g, b] bytes to [n, g, 2b] nibbles: low ones of all bytes, then high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _fifth_bits(blocks: U8, at: int) -> U8:
    """The 32 bits at byte `at` as 0 or 16, [n, 1, 32], lowest bit first."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits[:, None, :] << np.uint8(4)


def _signed(codes: U8, middle: int) -> I8:
    return codes.view(np.int8) - np.int8(middle)


# -- blocks of 32 ----------------------------------------------------------------------------------


def _q4_0(b: U8) -> UnpackedGroups:
    return UnpackedGroups(_signed(_nibbles(b[:, None, 2:]), 8), _half(b, 0))


def _q4_1(b: U8) -> UnpackedGroups:
    return UnpackedGroups(_nibbles(b[:, None, 4:]).view(np.int8), _half(b, 0), _half(b, 2))


def _q5_0(b: U8) -> UnpackedGroups:
    return UnpackedGroups(_signed(_nibbles(b[:, None, 6:]) | _fifth_bits(b, 2), 16), _half(b, 0))


def _q5_1(b: U8) -> UnpackedGroups:
    codes = _nibbles(b[:, None, 8:]) | _fifth_bits(b, 4)
    return UnpackedGroups(codes.view(np.int8), _half(b, 0), _half(b, 2))


def _q8_0(b: U8) -> UnpackedGroups:
    return UnpackedGroups(b[:, None, 2:].view(np.int8), _half(b, 0))


# A non-linear 4-bit code: sixteen levels, closer together around zero.
NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(b: U8) -> UnpackedGroups:
    return UnpackedGroups(NON_LINEAR[_nibbles(b[:, None, 2:])], _half(b, 0))


def _mxfp4(b: U8) -> UnpackedGroups:
    """An E8M0 exponent e, then E2M1 values; the scale is half of 2^(e - 127)."""
    from quire.quant.mxfp4 import E2M1  # few files have this type

    scales = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128).astype(np.float32)
    return UnpackedGroups(E2M1[_nibbles(b[:, None, 1:])], scales)


# -- blocks of 256 ("K" types): groups of 16 or 32 with quantized scales ---------------------------


def _crumbs(packed: U8) -> U8:
    """[n, 64] bytes to [n, 2, 4, 32] two-bit numbers: of each half's 32 bytes the lowest bits first."""
    halves = packed.reshape(-1, 2, 1, 32)
    return (halves >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & np.uint8(3)


def _q2_k(b: U8) -> UnpackedGroups:
    scales, codes = b[:, :16], _crumbs(b[:, 16:80])
    return UnpackedGroups(
        codes.reshape(-1, 16, 16).view(np.int8),
        _half(b, 80) * (scales & 15).astype(np.float32),
        -(_half(b, 82) * (scales >> 4).astype(np.float32)),
    )


def _q3_k(b: U8) -> UnpackedGroups:
    low, packed = _crumbs(b[:, 32:96]), b[:, 96:108]
    # Bit i of mask byte l belongs to value 32 i + l; if it is unset, 4 is subtracted.
    high = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    codes = _signed((low.reshape(-1, 8, 32) | (high << np.uint8(2))), 4)
    top = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & np.uint8(3)
    six = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1) | (top.reshape(-1, 16) << 4)
    scales = _half(b, 108) * _signed(six, 32).astype(np.float32)
    return UnpackedGroups(codes.reshape(-1, 16, 16), scales)


def _scales_and_mins(packed: U8) -> tuple[U8, U8]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes, each [n, 8]."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
    mins = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
    return scales, mins


def _affine_k(b: U8, codes: U8) -> UnpackedGroups:
    scales, mins = _scales_and_mins(b[:, 4:16])
    return UnpackedGroups(
        codes.view(np.int8),
        _half(b, 0) * scales.astype(np.float32),
        -(_half(b, 2) * mins.astype(np.float32)),
    )


def _q4_k(b: U8) -> UnpackedGroups:
    return _affine_k(b, _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(b: U8) -> UnpackedGroups:
    fifth = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    low = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _affine_k(b, low | (fifth << np.uint8(4)))


def _q6_k(b: U8) -> UnpackedGroups:
    low = b[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None]
    codes = (low & np.uint8(15)).reshape(-1, 2, 4, 32) | (_crumbs(b[:, 128:192]) << np.uint8(4))
    scales = b[:, 192:208].view(np.int8)
    return UnpackedGroups(_signed(codes, 32).reshape(-1, 16, 16), _half(b, 208) * scales.astype(np.float32))


def _iq4_xs(b: U8) -> UnpackedGroups:
    codes = NON_LINEAR[_nibbles(b[:, 8:].reshape(-1, 8, 16))]
    low = (b[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(-1, 8) & np.uint8(15)
    high = (b[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(-1, 8) & np.uint8(3)
    return UnpackedGroups(codes, _half(b, 0) * _signed(low | (high << np.uint8(4)), 32).astype(np.float32))


_READ: tuple[tuple[int, BlockType], ...] = (
    (0, BlockType("F32", 1, 4)),
    (1, BlockType("F16", 1, 2)),
    (30, BlockType("BF16", 1, 2)),
    (2, BlockType("Q4_0", 32, 18, _q4_0, 32)),
    (3, BlockType("Q4_1", 32, 20, _q4_1, 32)),
    (6, BlockType("Q5_0", 32, 22, _q5_0, 32)),
    (7, BlockType("Q5_1", 32, 24, _q5_1, 32)),
    (8, BlockType("Q8_0", 32, 34, _q8_0, 32)),
    (10, BlockType("Q2_K", 256, 84, _q2_k, 16)),
    (11, BlockType("Q3_K", 256, 110, _q3_k, 16)),
    (12, BlockType("Q4_K", 256, 144, _q4_k, 32)),
    (13, BlockType("Q5_K", 256, 176, _q5_k, 32)),
    (14, BlockType("Q6_K", 256, 210, _q6_k, 16)),
    (20, BlockType("IQ4_NL", 32, 18, _iq4_nl, 32)),
    (23, BlockType("IQ4_XS", 256, 136, _iq4_xs, 32)),
    (39, BlockType("MXFP4", 32, 17, _mxfp4, 32)),
)  # fmt: skip
# Types that a file may contain but that are not supported: their sizes are checked, and messages name them.
_KNOWN: tuple[tuple[int, BlockType], ...] = (
    (9, BlockType("Q8_1", 32, 36)), (15, BlockType("Q8_K", 256, 292)),
    (16, BlockType("IQ2_XXS", 256, 66)), (17, BlockType("IQ2_XS", 256, 74)),
    (18, BlockType("IQ3_XXS", 256, 98)), (19, BlockType("IQ1_S", 256, 50)),
    (21, BlockType("IQ3_S", 256, 110)), (22, BlockType("IQ2_S", 256, 82)),
    (24, BlockType("I8", 1, 1)), (25, BlockType("I16", 1, 2)), (26, BlockType("I32", 1, 4)),
    (27, BlockType("I64", 1, 8)), (28, BlockType("F64", 1, 8)), (29, BlockType("IQ1_M", 256, 56)),
    (34, BlockType("TQ1_0", 256, 54)), (35, BlockType("TQ2_0", 256, 66)),
    (40, BlockType("NVFP4", 64, 36)), (41, BlockType("Q1_0", 128, 18)),
)  # fmt: skip


def _packed(bits: int, size: int, scales: ScaleKind, offsets: OffsetKind = "none") -> WeightFormat:
    return WeightFormat(CODES[bits], Groups(size, scales, offsets))


# How kernels compute a type: bits of a code, values of a group, how scales and offsets are kept.
PACKED: dict[str, WeightFormat] = {
    "Q4_0": _packed(4, 32, "f16"),
    "Q4_1": _packed(4, 32, "f16", "f16"),
    "Q5_0": _packed(8, 32, "f16"),
    "Q5_1": _packed(8, 32, "f16", "f16"),
    "Q8_0": _packed(8, 32, "f16"),
    "Q2_K": _packed(2, 16, "f16*u8", "f16*u8"),
    "Q3_K": _packed(4, 16, "f32"),
    "Q4_K": _packed(4, 32, "f16*u8", "f16*u8"),
    "Q5_K": _packed(8, 32, "f16*u8", "f16*u8"),
    "Q6_K": _packed(8, 16, "f32"),
    "IQ4_NL": _packed(8, 32, "f16"),
    "IQ4_XS": _packed(8, 32, "f32"),
    "MXFP4": _packed(8, 32, "f32"),
}
READ_TYPES: dict[str, BlockType] = {kind.name: kind for _, kind in _READ}
TYPES_BY_ID: dict[int, BlockType] = dict(_READ + _KNOWN)
TYPE_IDS: dict[str, int] = {kind.name: number for number, kind in TYPES_BY_ID.items()}
