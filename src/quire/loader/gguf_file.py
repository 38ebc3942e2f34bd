"""A strict reader of GGUF files: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

    4 bytes   "GGUF"; then the version (2 or 3), the number of tensors and of metadata entries
    entries   key, type, value
    tensors   name, axes, sizes (innermost first), type, offset
    the rest  the tensors' bytes; offsets count from the next multiple of general.alignment

The file is untrusted: every count, length and offset is compared with the remaining bytes, as a Python integer, before
it is used. Arrays are decoded on demand, and tensors are views of the memory map.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.quant.ggml import TYPES_BY_ID, BlockType
from quire.records import dataclass
from quire.spec.config_reader import show
from quire.types import CheckpointError, UnsupportedModelError
from quire.util.files import identity_of, open_to_map
from quire.util.lfs import POINTER, POINTER_BYTES, is_pointer

MAX_HEADER_BYTES = 512 * 2**20
MAX_ENTRIES = 2**16
MAX_TENSORS = 2**17
MAX_NAME_BYTES = 1024
MAX_STRING_BYTES = 16 * 2**20
MAX_AXES = 4
MAX_DIM = 2**48
MAX_ALIGNMENT = 2**20
_DEFAULT_ALIGNMENT = 32
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
# Number types by id: struct format.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B",
            10: "<Q", 11: "<q", 12: "<d"}  # fmt: skip
_SIZES = {kind: struct.calcsize(code) for kind, code in _NUMBERS.items()}

Scalar = int | float | bool | str


class GGUFArray:
    """An array of a metadata entry, checked but not decoded: `len()`, then `strings()` or `numbers()`."""

    __slots__ = ("_data", "_kind", "_offset", "_where", "count")

    def __init__(self, data: memoryview, offset: int, kind: int, count: int, where: str) -> None:
        self._data, self._offset, self._kind = data, offset, kind
        self._where = where
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        what = "strings" if self._kind == _STRING else "numbers"
        return f"[{self.count} {what}]"

    @property
    def holds_strings(self) -> bool:
        return self._kind == _STRING

    def strings(self, numbers: Iterable[int] | None = None) -> list[str]:
        """Decode all strings, or those with ascending `numbers`, up to the last of them.

        CheckpointError if the elements are not strings, or not UTF-8.
        """
        if self._kind != _STRING:
            raise CheckpointError(f"{self._where}: is not an array of strings")
        data, position, length = self._data, self._offset, struct.Struct("<Q")
        found: list[str] = []
        at = 0
        for number in range(self.count) if numbers is None else numbers:
            while at < number:
                position += 8 + length.unpack_from(data, position)[0]
                at += 1
            (size,) = length.unpack_from(data, position)
            position, at = position + 8 + size, number + 1
            try:
                found.append(str(data[position - size : position], "utf-8"))
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self._where}: string {number} is not UTF-8: {error}") from None
        return found

    def numbers(self) -> npt.NDArray[np.generic]:
        """All numbers, as a copy. CheckpointError if the elements are strings."""
        if self._kind == _STRING:
            raise CheckpointError(f"{self._where}: is an array of strings, not of numbers")
        code = _NUMBERS[self._kind]
        dtype = np.dtype(bool) if self._kind == _BOOL else np.dtype(code)
        size = self.count * _SIZES[self._kind]
        return np.frombuffer(self._data[self._offset : self._offset + size], dtype).copy()


Value = Scalar | GGUFArray


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor: `shape` outermost first (rows, columns); bytes [begin, end) of the file."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything before the tensor data; `nbytes` is its length."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]
    nbytes: int


class _Cursor:
    """A position in the file's bytes that never passes their end."""

    def __init__(self, data: memoryview, where: str) -> None:
        self.data, self.where = data, where
        self.position = 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}")

    def need(self, nbytes: int, what: str) -> int:
        """Skip `nbytes` and return where they start."""
        left = self.end - self.position
        if nbytes > left:
            limit = "" if self.end == len(self.data) else f" of a header of at most {MAX_HEADER_BYTES} bytes"
            raise self.error(f"{what}: needs {nbytes} bytes, but {left} are left{limit}")
        start = self.position
        self.position += nbytes
        return start

    def number(self, kind: int, what: str) -> int | float:
        start = self.need(_SIZES[kind], what)
        value: int | float = struct.unpack_from(_NUMBERS[kind], self.data, start)[0]
        # The shortest decimal that rounds to the float32: 1e-5, as its writer meant.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def count(self, kind: int, what: str, limit: int, smallest: int) -> int:
        """Read a count of items of at least `smallest` bytes each, which must fit into the rest."""
        count = int(self.number(kind, what))
        if count > limit:
            raise self.error(f"{what}: {count} exceeds the limit of {limit}")
        if count * smallest > self.end - self.position:
            raise self.error(
                f"{what}: {count} do not fit into the remaining {self.end - self.position} bytes"
            )
        return count

    def string(self, what: str, limit: int) -> str:
        size = self.count(10, f"{what}: length", limit, 1)
        start = self.need(size, what)
        try:
            return str(self.data[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what}: not UTF-8: {error}") from None


def parse_header(data: memoryview, where: str) -> GGUFHeader:
    """Check a whole file's bytes and return its metadata and tensors; `data` must outlive the result.

    Raises CheckpointError naming the file (`where`), the field and the limit for anything malformed;
    UnsupportedModelError for a valid version or byte order that is not supported.
    """
    cursor = _Cursor(data, where)
    if is_pointer(bytes(data[:POINTER_BYTES])):
        raise cursor.error(POINTER)
    if len(data) < 24 or bytes(data[:4]) != b"GGUF":
        raise cursor.error(f"not a GGUF file of at least 24 bytes (it has {len(data)})")
    cursor.position = 4
    version = int(cursor.number(4, "version"))
    if version not in (2, 3):
        order = ": written on a big-endian machine" if version and not version & 0xFFFF else ""
        raise UnsupportedModelError(
            f"{where}: GGUF version {version}{order} is not supported, only 2 and 3 are"
        )
    tensors = cursor.count(10, "tensor count", MAX_TENSORS, 24)
    entries = cursor.count(10, "metadata count", MAX_ENTRIES, 13)
    metadata: dict[str, Value] = {}
    for number in range(entries):
        key = cursor.string(f"metadata key {number}", MAX_NAME_BYTES)
        if not key or key in metadata:
            raise cursor.error(f"metadata key {show(key)} is {'listed twice' if key else 'empty'}")
        metadata[key] = _value(cursor, key)
    alignment = _alignment(cursor, metadata)
    infos = [_tensor_info(cursor, number, alignment) for number in range(tensors)]
    start = -(-cursor.position // alignment) * alignment
    found = _place(cursor, infos, start)
    return GGUFHeader(metadata, found, cursor.position)


def _value(cursor: _Cursor, key: str) -> Value:
    what = f"metadata {show(key)}"
    kind = int(cursor.number(4, f"{what}: type"))
    if kind == _STRING:
        return cursor.string(what, MAX_STRING_BYTES)
    if kind == _ARRAY:
        return _array(cursor, what)
    if kind not in _NUMBERS:
        raise cursor.error(f"{what}: unknown value type {kind}")
    value = cursor.number(kind, what)
    return _checked_bool(cursor, value, what) if kind == _BOOL else value


def _checked_bool(cursor: _Cursor, value: int | float, what: str) -> bool:
    if value not in (0, 1):
        raise cursor.error(f"{what}: {value} is not a boolean")
    return bool(value)


def _array(cursor: _Cursor, what: str) -> GGUFArray:
    kind = int(cursor.number(4, f"{what}: element type"))
    if kind == _ARRAY:
        raise cursor.error(f"{what}: nested arrays are not supported")
    if kind != _STRING and kind not in _NUMBERS:
        raise cursor.error(f"{what}: unknown element type {kind}")
    smallest = 8 if kind == _STRING else _SIZES[kind]
    count = cursor.count(10, f"{what}: count", MAX_HEADER_BYTES, smallest)
    start = cursor.position
    if kind == _STRING:
        _skip_strings(cursor, count, what)
    else:
        cursor.need(count * smallest, what)
    if kind == _BOOL and any(byte > 1 for byte in cursor.data[start : cursor.position]):
        raise cursor.error(f"{what}: contains a byte that is not a boolean")
    return GGUFArray(cursor.data, start, kind, count, f"{cursor.where}: {what}")


def _skip_strings(cursor: _Cursor, count: int, what: str) -> None:
    """Skip strings, each checked against the end; a plain loop, because vocabularies have 10^5 of them."""
    data, position, end, length = cursor.data, cursor.position, cursor.end, struct.Struct("<Q").unpack_from
    number = 0
    try:
        for number in range(count):
            (size,) = length(data, position)
            position += 8 + size
            if size > MAX_STRING_BYTES or position > end:
                raise cursor.error(f"{what}: string {number} of {size} bytes exceeds the file or its limit")
    except struct.error:
        raise cursor.error(f"{what}: string {number} starts past the end") from None
    cursor.position = position


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not 8 <= value <= MAX_ALIGNMENT
        or value & (value - 1)
    ):
        raise cursor.error(f"general.alignment: {show(value)} is not a power of two in [8, {MAX_ALIGNMENT}]")
    return value


def _tensor_info(cursor: _Cursor, number: int, alignment: int) -> GGUFTensor:
    """Read a tensor entry; its `begin` and `end` still count from the start of the data."""
    name = cursor.string(f"name of tensor {number}", MAX_NAME_BYTES)
    what = f"tensor {show(name)}"
    axes = int(cursor.number(4, f"{what}: axes"))
    if not 1 <= axes <= MAX_AXES:
        raise cursor.error(f"{what}: {axes} axes, not in [1, {MAX_AXES}]")
    sizes = [int(cursor.number(11, f"{what}: sizes")) for _ in range(axes)]
    if not all(1 <= size <= MAX_DIM for size in sizes):
        raise cursor.error(f"{what}: a size of {show(sizes)} is not in [1, 2^48]")
    number_of_type = int(cursor.number(4, f"{what}: type"))
    kind = TYPES_BY_ID.get(number_of_type)
    if kind is None:
        raise cursor.error(f"{what}: unknown type {number_of_type}")
    if sizes[0] % kind.values:
        raise cursor.error(
            f"{what}: rows of {sizes[0]} are no multiple of blocks of {kind.values} ({kind.name})"
        )
    offset = int(cursor.number(10, f"{what}: offset"))
    if offset % alignment:
        raise cursor.error(f"{what}: offset {offset} is not a multiple of the alignment {alignment}")
    nbytes = math.prod(sizes) // kind.values * kind.nbytes
    return GGUFTensor(name, kind, tuple(reversed(sizes)), offset, offset + nbytes)


def _place(cursor: _Cursor, infos: list[GGUFTensor], start: int) -> dict[str, GGUFTensor]:
    """Tensors by name, with file positions. They must not overlap or extend past the end of the file."""
    found: dict[str, GGUFTensor] = {}
    position, before = 0, "the header"
    for info in sorted(infos, key=lambda info: info.begin):
        name = show(info.name)
        if info.name in found:
            raise cursor.error(f"tensor {name} is listed twice")
        if info.begin < position:
            raise cursor.error(f"tensor {name} overlaps {before}")
        past = start + info.end - len(cursor.data)
        if past > 0:
            raise cursor.error(
                f"tensor {name} extends {past} bytes past the end of the file; the download may be incomplete"
            )
        position, before = info.end, f"tensor {name}"
        found[info.name] = GGUFTensor(info.name, info.kind, info.shape, start + info.begin, start + info.end)
    return {info.name: found[info.name] for info in infos}


class GGUFFile:
    """One open file: its header, and tensors as rows of bytes.

    Raises CheckpointError if the file cannot be opened or its header is invalid. Bytes are read-only views of the
    memory map, valid as long as they are referenced. The file must not shrink while it is in use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_to_map(path) as file:
            self.identity = identity_of(file)
            size = self.identity.size
            if size < 24:
                raise CheckpointError(f"{path.name}: {size} bytes are too short for a GGUF file")
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        try:
            self.header = parse_header(self._view, path.name)
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> Mapping[str, Value]:
        return self.header.metadata

    @property
    def tensors(self) -> Mapping[str, GGUFTensor]:
        return self.header.tensors

    def header_bytes(self) -> memoryview:
        return self._view[: self.header.nbytes]

    def rows(self, tensor: GGUFTensor, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes of rows [start, stop), with all axes but the innermost joined, uint8 [rows, row bytes]."""
        row_bytes = tensor.shape[-1] // tensor.kind.values * tensor.kind.nbytes
        offset = tensor.begin + start * row_bytes
        nbytes = (stop - start) * row_bytes
        self._advise("MADV_WILLNEED", offset, min(offset + 2 * nbytes, tensor.end))
        return np.frombuffer(self._map, np.uint8, nbytes, offset).reshape(stop - start, row_bytes)

    def release(self, tensor: GGUFTensor) -> None:
        """Release the memory that reads of the tensor made resident."""
        self._advise("MADV_DONTNEED", tensor.begin, tensor.end)

    def release_header(self) -> None:
        """Release the memory that reading the metadata made resident."""
        self._advise("MADV_DONTNEED", 0, self.header.nbytes)

    def close(self) -> None:
        """Unmap the file, at the latest when the last array into it is gone."""
        with contextlib.suppress(BufferError):
            self._view.release()
        with contextlib.suppress(BufferError):
            self._map.close()

    def _advise(self, advice: str, begin: int, end: int) -> None:
        option = getattr(mmap, advice, None)
        if option is not None and end > begin:
            begin -= begin % mmap.PAGESIZE
            self._map.madvise(option, begin, end - begin)
