"""A strict reader of the safetensors format: https://huggingface.co/docs/safetensors.

    8 bytes   N, unsigned little-endian
    N bytes   JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__"
    the rest  the tensors' bytes; offsets count from here, without holes or overlaps

The header is untrusted: every number is compared with the length of the file, as a Python integer, before anything is
allocated or mapped. Tensors are views of a memory map and need no additional memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from quire.loader.source import NUMPY_TYPES, Array, TensorInfo
from quire.records import dataclass
from quire.spec.config_reader import show
from quire.types import CheckpointError
from quire.util.files import identity_of, open_to_map
from quire.util.lfs import POINTER, POINTER_BYTES, is_pointer
from quire.util.strict_json import parse_json_object

MAX_HEADER_BYTES = 32 * 2**20  # about 200,000 tensors
_MAX_AXES = 32
_MAX_DIM = 2**48
_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor and its bytes [begin, end) in the data part of the file."""

    info: TensorInfo
    begin: int
    end: int


def parse_header(header: bytes, data_bytes: int, where: str) -> dict[str, TensorEntry]:
    """Check a header against the length of the data part and return its tensors in file order.

    Raises CheckpointError naming the file (`where`) and the tensor for: malformed JSON, duplicate names,
    unknown formats, bad shapes, a byte range that disagrees with the shape, overlaps, holes, trailing bytes.
    """
    if not header.startswith(b"{"):
        raise CheckpointError(f"{where}: the header does not start with '{{'")
    values = parse_json_object(header, f"{where}: header")
    values.pop("__metadata__", None)
    entries = [_entry(name, value, where) for name, value in values.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position, before = 0, None
    for entry in entries:
        if entry.begin != position or entry.end > data_bytes:
            raise _misplaced(entry, position, before, data_bytes, where)
        position, before = entry.end, entry
    if position != data_bytes:
        raise CheckpointError(f"{where}: {data_bytes - position} trailing bytes after {_named(before)}")
    return {entry.info.name: entry for entry in entries}


def _misplaced(
    entry: TensorEntry, position: int, before: TensorEntry | None, data_bytes: int, where: str
) -> CheckpointError:
    """The error of a misplaced tensor after `before`, which ends at `position`."""
    if entry.begin < position:
        return CheckpointError(f"{where}: {_named(entry)} overlaps {_named(before)}")
    if entry.begin > position:
        return CheckpointError(f"{where}: {entry.begin - position} unused bytes before {_named(entry)}")
    past = entry.end - data_bytes
    return CheckpointError(
        f"{where}: {_named(entry)} extends {past} bytes past the end of the file; the download may be incomplete"
    )


def _named(entry: TensorEntry | None) -> str:
    return "the header" if entry is None else f"tensor {show(entry.info.name)}"


def _entry(name: str, value: object, where: str) -> TensorEntry:
    def error(message: str) -> CheckpointError:
        return CheckpointError(f"{where}: tensor {show(name)}: {message}")

    if not isinstance(value, dict) or value.keys() != _KEYS:
        raise error("expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NUMPY_TYPES:
        raise error(f"unknown dtype {show(dtype)}")
    if not isinstance(shape, list) or len(shape) > _MAX_AXES:
        raise error(f"shape {show(shape)} is not a list of at most {_MAX_AXES} sizes")
    if not _are_sizes(shape, _MAX_DIM):
        raise error(f"shape {show(shape)} has a size that is not in [0, 2^48]")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_sizes(offsets, 2**63):
        raise error(f"data_offsets {show(offsets)} is not a pair of offsets")
    begin, end = offsets
    info = TensorInfo(name, dtype, tuple(shape))
    if end - begin != info.nbytes:
        raise error(
            f"{dtype} of shape {show(shape)} needs {show(info.nbytes)} bytes, but data_offsets span {end - begin}"
        )
    return TensorEntry(info, begin, end)


def _are_sizes(values: list[object], limit: int) -> bool:
    """A plain loop, because a checkpoint may have 10^5 tensors."""
    for value in values:  # noqa: SIM110
        if type(value) is not int or not 0 <= value <= limit:  # refuses booleans
            return False
    return True


class SafetensorsFile:
    """One open safetensors file. Implements Source.

    Raises CheckpointError if the file cannot be opened or its header is invalid. Tensors are read-only views of the
    memory map, valid as long as they are referenced. The file must not shrink while it is in use. `prefix` is put
    before all names.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.path = path
        with open_to_map(path) as file:
            self.identity = identity_of(file)
            self._entries, self._start, size = _read_header(file, path.name)
            if prefix:
                self._entries = {
                    f"{prefix}{name}": _renamed(entry, prefix) for name, entry in self._entries.items()
                }
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def info(self, name: str) -> TensorInfo:
        return self._entries[name].info

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows [start, stop) of a tensor, or all of a scalar; see Source."""
        entry = self._entries[name]
        if not entry.info.shape:
            data = np.frombuffer(self._map, np.uint8, entry.end - entry.begin, self._start + entry.begin)
            return data.view(NUMPY_TYPES[entry.info.dtype]).reshape(())
        start, stop = entry.info.rows(start, stop)
        shape, dtype = (stop - start, *entry.info.shape[1:]), NUMPY_TYPES[entry.info.dtype]
        row_bytes = (entry.end - entry.begin) // max(entry.info.shape[0], 1)
        begin = entry.begin + start * row_bytes
        if row_bytes * (stop - start) == 0:
            return np.empty(shape, dtype)
        return self.between(begin, entry.begin + stop * row_bytes).view(dtype).reshape(shape)

    def between(self, begin: int, end: int) -> Array:
        """Bytes [begin, end) of the data part, as TensorEntry has them."""
        return np.frombuffer(self._map, np.uint8, end - begin, self._start + begin)

    def place_of(self, name: str) -> tuple[int, int]:
        """The bytes [begin, end) of a tensor in the file."""
        entry = self._entries[name]
        return self._start + entry.begin, self._start + entry.end

    def prefetch(self, name: str, start: int, stop: int) -> None:
        """Let the kernel read rows [start, stop) in the background."""
        entry = self._entries[name]
        row_bytes = (entry.end - entry.begin) // max(entry.info.shape[0], 1)
        begin = self._start + entry.begin
        self._advise("MADV_WILLNEED", begin + start * row_bytes, begin + stop * row_bytes)

    def release(self, name: str) -> None:
        entry = self._entries[name]
        self._advise("MADV_DONTNEED", self._start + entry.begin, self._start + entry.end)

    def close(self) -> None:
        """Unmap the file, at the latest when the last array into it is gone."""
        with contextlib.suppress(BufferError):  # an array into it keeps it alive
            self._map.close()

    def _advise(self, advice: str, begin: int, end: int) -> None:
        """Advise the kernel about the pages of bytes [begin, end), if the platform supports it."""
        option = getattr(mmap, advice, None)
        if option is not None and end > begin:
            begin -= begin % mmap.PAGESIZE
            self._map.madvise(option, begin, end - begin)


def _renamed(entry: TensorEntry, prefix: str) -> TensorEntry:
    return TensorEntry(replace(entry.info, name=f"{prefix}{entry.info.name}"), entry.begin, entry.end)


def _read_header(file: BinaryIO, where: str) -> tuple[dict[str, TensorEntry], int, int]:
    """Tensors of an open file, the start of their bytes, and the size of the file."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{where}: {size} bytes are too short for a safetensors file")
    length = int.from_bytes(prefix, "little")
    if is_pointer(prefix + file.read(POINTER_BYTES)):
        raise CheckpointError(f"{where}: {POINTER}")
    file.seek(len(prefix))
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{where}: header of {length} bytes exceeds the limit of {MAX_HEADER_BYTES}")
    if length > size - 8:
        raise CheckpointError(f"{where}: header of {length} bytes in a file of {size} bytes")
    header = file.read(length)
    if len(header) != length:
        raise CheckpointError(f"{where}: the file shrank while it was read")
    return parse_header(header, size - 8 - length, where), 8 + length, size
