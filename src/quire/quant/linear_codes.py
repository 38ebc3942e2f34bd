"""The common form of stored quantized weights of linears: a matrix [out features, in features].

All integer formats are the same underneath: codes in groups along the input features, with a scale and a zero point per
group,

    value = scale · (code - zero),    float32, the product rounded once,

and differ in the packing of bits. `Integers` is this form; the module of a format unpacks to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from quire.program.formats import CODE_BITS, CODES, GROUP_SIZES, Groups, ScaleKind, WeightFormat
from quire.quant.groups import GroupCodes
from quire.records import dataclass
from quire.types import CheckpointError

F32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]  # suffix after the module's name -> the whole stored array
_SCALES: dict[str, ScaleKind] = {"F16": "f16", "BF16": "bf16", "F32": "f32"}
FLOATS = tuple(_SCALES)  # formats of stored scales


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored array: the safetensors name of its format, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class QuantizedLinear(Protocol):
    """The weight of a module [out, in], or a stack [experts, out, in]. `label` describes its format."""

    @property
    def label(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dequantize(self, arrays: Arrays, start: int, stop: int) -> F32:
        """Rows [start, stop) of the first axis, float32."""


@runtime_checkable
class PackedLinear(QuantizedLinear, Protocol):
    """A weight of integers. `packed` is the format in which kernels can compute its codes, None if it must be
    dequantized.
    """

    @property
    def packed(self) -> WeightFormat | None: ...

    def codes(self, arrays: Arrays, start: int, stop: int) -> GroupCodes:
        """Rows [start, stop) in the format `packed`."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Unpacked rows: integer `codes` [rows, cols], `scales` [rows, groups] in float32, float16 or bfloat16 bits
    (uint16), `zeros` [rows, groups] or one number for all. `group_of` [cols] is the group of each column if groups are
    not runs of equal length.
    """

    codes: Array
    scales: Array
    zeros: Array | int
    group_of: npt.NDArray[np.int64] | None = None

    def values(self) -> F32:
        """float32 [rows, cols]."""
        rows, cols = self.codes.shape
        scales = as_float32(self.scales)
        if self.group_of is not None:
            zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[:, self.group_of]
            found: F32 = (self.codes.astype(np.int32) - zeros).astype(np.float32) * scales[:, self.group_of]
            return found
        groups = scales.shape[1]
        size = -(-cols // groups)
        padded = np.zeros((rows, groups * size), np.int32)
        padded[:, :cols] = self.codes
        split = padded.reshape(rows, groups, size)
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[:, :, None].astype(np.int32)
        values: F32 = (split - zeros).astype(np.float32) * scales[:, :, None]
        return values.reshape(rows, -1)[:, :cols]

    def grouped(self, fmt: WeightFormat) -> GroupCodes:
        """Convert to a format in groups whose size divides the size of these groups, without rounding."""
        assert fmt.groups is not None
        cols = self.codes.shape[1]
        wanted, groups = fmt.groups.count(cols), self.scales.shape[1]
        times = -(-wanted // groups)
        scales = np.ascontiguousarray(np.repeat(self.scales, times, axis=1)[:, :wanted])
        middle = 1 << (CODE_BITS[fmt.dtype] - 1)
        if fmt.groups.offsets == "none":
            shift = middle - int(self.zeros if isinstance(self.zeros, int) else 0)
            return GroupCodes((self.codes.astype(np.int16) + shift).astype(np.uint8), scales)
        assert not isinstance(self.zeros, int)
        zeros = np.repeat(self.zeros, times, axis=1)[:, :wanted]
        return GroupCodes(
            np.ascontiguousarray(self.codes, np.uint8), scales, np.ascontiguousarray(zeros, np.uint8)
        )


@dataclass(frozen=True, slots=True)
class IntegerLinear:
    """One linear of integers: a PackedLinear. `unpack(arrays, start, stop)` reads rows [start, stop)."""

    label: str
    shape: tuple[int, int]
    packed: WeightFormat | None
    unpack: Callable[[Arrays, int, int], Integers]

    def dequantize(self, arrays: Arrays, start: int, stop: int) -> F32:
        return self.unpack(arrays, start, stop).values()

    def codes(self, arrays: Arrays, start: int, stop: int) -> GroupCodes:
        assert self.packed is not None
        return self.unpack(arrays, start, stop).grouped(self.packed)


def as_float32(values: Array) -> F32:
    """Convert float32, float16 or bfloat16 bits (uint16) to float32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def unpack_bits(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Unpack numbers of `bits` bits along the first axis: words [n, m] of 32 bits to [n · 32 / bits, m].

    The words are one stream, lowest bits first; with 3 bits a number may span two words.
    """
    n, m = words.shape
    stream = np.ascontiguousarray(words.T).view(np.uint8).reshape(m, n * 4)
    if bits == 8:
        return np.ascontiguousarray(stream.T)
    if bits in {2, 4}:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        parts = (stream[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)
        return np.ascontiguousarray(parts.reshape(m, -1).T)
    ones = np.unpackbits(stream, axis=1, bitorder="little")
    ones = ones[:, : ones.shape[1] // bits * bits].reshape(m, -1, bits)
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return np.ascontiguousarray((ones * weights).sum(-1, dtype=np.uint8).T)


def pack_bits(numbers: Array, bits: int) -> npt.NDArray[np.int32]:
    """Pack numbers of `bits` bits along the first axis: [n, m] to words [n · bits / 32, m], as unpack_bits reads them.

    Raises ValueError if they do not fill whole words.
    """
    n, m = numbers.shape
    if n * bits % 32:
        raise ValueError(f"{n} numbers of {bits} bits do not fill words of 32")
    if bits == 3:
        ones = np.unpackbits(
            np.ascontiguousarray(numbers.T, np.uint8)[..., None], axis=-1, count=3, bitorder="little"
        )
        stream = np.packbits(ones.reshape(m, n * 3), axis=1, bitorder="little")
        return np.ascontiguousarray(stream.view("<i4").T)
    parts = numbers.reshape(-1, 32 // bits, m)
    words = np.zeros((len(parts), m), np.uint32)
    for at in range(32 // bits):
        words |= parts[:, at].astype(np.uint32) << np.uint32(bits * at)
    return words.view(np.int32)


def packed_format(bits: int, cols: int, groups: int, scale_dtype: str, *, zeros: bool) -> WeightFormat | None:
    """The format that computes integer codes, None if their groups have no such format."""
    size = -(-cols // groups)
    if bits not in {2, 3, 4, 8} or scale_dtype not in _SCALES or (groups > 1 and cols % size):
        return None
    if groups == 1:
        size = GROUP_SIZES[-1]  # one scale per row, repeated for each group
    fitting = [s for s in GROUP_SIZES if size % s == 0]
    if not fitting:
        return None
    return code_format(bits, Groups(fitting[-1], _SCALES[scale_dtype], "u8" if zeros else "none"))


def code_format(bits: int, groups: Groups) -> WeightFormat:
    """The narrowest format of kernels that holds codes of 1 to 8 bits in these groups."""
    narrow = groups.size == GROUP_SIZES[0]  # 3 bits take twice as many
    held = next(b for b in sorted(CODES) if b >= bits and not (b == 3 and narrow))
    return WeightFormat(CODES[held], groups)


def need(infos: Mapping[str, Stored], name: str, dtypes: tuple[str, ...], where: str) -> Stored:
    """Return a required component in one of these formats."""
    found = infos.get(name)
    if found is None:
        raise CheckpointError(f"{where}: {name} is missing")
    if found.dtype not in dtypes:
        raise CheckpointError(f"{where}: {name}: dtype {found.dtype} is not {' or '.join(dtypes)}")
    return found


def check_shape(stored: Stored, shape: tuple[int, ...], name: str, where: str) -> None:
    if stored.shape != shape:
        raise CheckpointError(
            f"{where}: {name}: shape {list(stored.shape)}, but the format implies {list(shape)}"
        )
