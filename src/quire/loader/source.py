"""The two protocols of loading, Source and Sink, and the number formats."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from quire.program.formats import WeightFormat
from quire.program.tensors import Param
from quire.quant import GroupCodes
from quire.records import dataclass

Array = npt.NDArray[np.generic]

# numpy types of formats by safetensors name. bfloat16 and the 8-bit floats have no numpy type and are represented by
# unsigned integers of their width.
NUMPY_TYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "F8_E4M3": "|u1", "F8_E5M2": "|u1", "F8_E8M0": "|u1",
        "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
        "U32": "<u4", "I32": "<i4", "F32": "<f4",
        "U64": "<u8", "I64": "<i8", "F64": "<f8", "C64": "<c8",
    }.items()
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a source: `dtype` is a key of NUMPY_TYPES.

    `stored` is the format in the file and `stored_bytes` its size there, if the source converts it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: str = ""
    stored_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * NUMPY_TYPES[self.dtype].itemsize

    def rows(self, start: int, stop: int | None) -> tuple[int, int]:
        """Clip [start, stop) to the first axis. Raises IndexError unless it is a range of existing rows."""
        end = self.shape[0] if stop is None else stop
        if not 0 <= start <= end <= self.shape[0]:
            raise IndexError(f"{self.name}: rows {start}:{end} of {self.shape[0]}")
        return start, end


class Source(Protocol):
    """A set of named tensors that can be read in any order, in row blocks."""

    def names(self) -> Iterable[str]:
        """Names of all tensors."""

    def info(self, name: str) -> TensorInfo:
        """Format and shape; KeyError if there is no such tensor."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows [start, stop) along the first axis, read-only, in the numpy type of its format."""

    def release(self, name: str) -> None:
        """Release the memory that reads of `name` made resident. Arrays already read stay valid."""


@runtime_checkable
class PrefetchingSource(Source, Protocol):
    """A source whose bytes may have to be read from a disk first."""

    def prefetch(self, name: str, start: int, stop: int) -> None:
        """Prepare for reading rows [start, stop) soon."""


@runtime_checkable
class CodesSource(Source, Protocol):
    """A source that can return some tensors as their stored codes, without rounding."""

    def packed(self, name: str) -> WeightFormat | None:
        """The format in groups of a tensor's codes; None if there is none."""

    def read_codes(self, name: str, start: int, stop: int) -> GroupCodes:
        """Rows [start, stop) in that format."""


class Sink(Protocol):
    """The destination of weights: an executor."""

    def put(self, param: Param, row_offset: int, data: Array, dtype: str) -> None:
        """Take rows [row_offset, row_offset + len(data)) of a parameter: [rows, cols], or [rows] for vectors.

        `dtype` is "F32", "F16" or "BF16" (as uint16). `data` is C-contiguous, aligned, possibly read-only, and only
        valid during the call. Every row of every parameter is put exactly once.
        """

    def put_codes(self, param: Param, row_offset: int, given: GroupCodes) -> None:
        """The same for a weight in groups (`param.groups`) with quantized rows."""


@runtime_checkable
class CheckingSink(Sink, Protocol):
    """A sink that checks for NaN and infinity itself, on all its threads, while the numbers are in a cache."""

    def put_checked(self, param: Param, row_offset: int, data: Array, dtype: str) -> int | None:
        """Like `put`; returns the flat index of the first NaN or infinity in `data`, or None."""
