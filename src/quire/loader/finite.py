"""Find NaN, infinity and numbers outside of a format in raw weights, at memory speed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from quire.loader.safetensors import SafetensorsFile, TensorEntry
from quire.loader.source import NUMPY_TYPES, Array

_CHUNK_BYTES = 2**18  # two passes over each chunk; the second finds it in the cache

# A float is NaN or infinite if its exponent bits are all ones, that is, if its magnitude bits as an integer reach this
# bound.
_EXPONENT: dict[str, int] = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
FLOAT_FORMATS = frozenset(_EXPONENT)
# The same for numbers beyond float16: 65520 and more are rounded to infinity.
_BEYOND_HALF = {"F32": 0x477FF000, "F16": 0x7C00, "BF16": 0x4780}


def first_nonfinite(data: Array, dtype: str, kept: str = "") -> int | None:
    """Return the flat index of the first NaN or infinity of a C-contiguous array in "F32", "F16" or "BF16", or None.

    `kept` "f16": also of the first number that becomes infinite in float16.

    Two integer maxima suffice, without a temporary: as signed integers only positive floats can reach the bound, and as
    unsigned ones every negative float lies above every positive one.
    """
    bound = (_BEYOND_HALF if kept == "f16" else _EXPONENT)[dtype]
    width = data.dtype.itemsize
    sign = 1 << (8 * width - 1)
    signed, unsigned = np.dtype(f"<i{width}"), np.dtype(f"<u{width}")
    flat = data.reshape(-1)
    step = _CHUNK_BYTES // width
    for start in range(0, flat.size, step):
        bits = flat[start : start + step].view(unsigned)
        if bits.view(signed).max() >= bound or bits.max() >= bound | sign:
            return start + int(np.argmax(bits & (sign - 1) >= bound))
    return None


class _Run:
    """Tensors of one format that are neighbours in a file, bytes [begin, end); those before `seen` are finite."""

    __slots__ = ("begin", "dtype", "end", "seen")

    def __init__(self, entry: TensorEntry) -> None:
        self.begin = self.seen = entry.begin
        self.end, self.dtype = entry.end, entry.info.dtype


class FiniteTensors:
    """Looks for NaN and infinity in small tensors of a file: neighbours are looked through together."""

    def __init__(self, file: SafetensorsFile, names: Iterable[str]) -> None:
        self._file = file
        self._entries = sorted(
            (file.tensors[name] for name in names), key=lambda entry: (entry.begin, entry.end)
        )
        self._runs: list[_Run] = []
        for entry in self._entries:
            last = self._runs[-1] if self._runs else None
            if last is not None and (last.end, last.dtype) == (entry.begin, entry.info.dtype):
                last.end = entry.end
            else:
                self._runs.append(_Run(entry))
        self._begins = [run.begin for run in self._runs]

    def first_bad(self, name: str) -> tuple[str, int] | None:
        """None if all numbers of a tensor are finite; or a tensor and the flat index of a number in it that is not: of
        this one, or of a neighbour that was looked through with it."""
        entry = self._file.tensors[name]
        run = self._runs[bisect_right(self._begins, entry.begin) - 1]
        while run.seen < entry.end:
            stop = min(run.end, run.seen + _CHUNK_BYTES)
            data = self._file.between(run.seen, stop).view(NUMPY_TYPES[run.dtype])
            bad = first_nonfinite(data, run.dtype)
            if bad is not None:
                byte = run.seen + bad * data.itemsize
                at = bisect_right(self._entries, byte, key=lambda entry: entry.begin) - 1
                return self._entries[at].info.name, (byte - self._entries[at].begin) // data.itemsize
            run.seen = stop
        return None
