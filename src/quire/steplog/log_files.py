"""Log files: a header, then frames. Each frame is checked, so that what is read is what was written.

header  "QUIRELOG", version (2 bytes), 0 (2 bytes)
frame   bytes of the row (4), the row, CRC-32 of both (4); numbers are little endian
end     of a file that is still written, or whose process died: zeros
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.records import dataclass
from quire.steplog.log_rows import AnyRow, Closed, encode
from quire.types import QuireError

MAGIC, VERSION = b"QUIRELOG", 1
HEADER = MAGIC + VERSION.to_bytes(2, "little") + b"\0\0"
MAX_ROW_BYTES = 2**26
MAX_LOG_BYTES = 2**34
WINDOW_BYTES = 2**18  # of a file that are mapped at a time
_number = struct.Struct("<I").pack
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class LogError(QuireError):
    """A file is no log, or one of another version."""


def log_beside(path: str, name: str) -> str:
    """The file of one of several engines that were given the same one: each writes its own alone."""
    file = Path(path)
    return str(file.with_name(f"{file.stem}-{name}{file.suffix}"))


def framed(body: bytes) -> bytes:
    """A row as it stands in a file."""
    data = _number(len(body)) + body
    return data + _number(zlib.crc32(data))


def unframed(frame: bytes) -> AnyRow:
    """The row of a frame that this process has made."""
    row: AnyRow = _decode(memoryview(frame)[4:-4])
    return row


@dataclass(frozen=True, slots=True)
class Log:
    """The rows of a log up to its end, or to where it is cut or damaged: `damage` then says where and how."""

    rows: list[AnyRow]
    damage: str = ""

    @property
    def closed(self) -> bool:
        """Whether the engine ended in order."""
        return bool(self.rows) and isinstance(self.rows[-1], Closed)


_decode = msgspec.msgpack.Decoder(AnyRow).decode


def read_rows(
    data: bytes | memoryview, name: str = "log", keep: Callable[[AnyRow], bool] = lambda _: True
) -> Log:
    """The rows of a log that are to be kept. Raises LogError for what does not begin as a log of this version."""
    head = bytes(data[: len(HEADER)])
    if head[: len(MAGIC)] != MAGIC or len(head) < len(HEADER):
        raise LogError(f"{name}: not a log of Quire: it does not begin with {MAGIC.decode()}")
    if head != HEADER:
        found = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 2], "little")
        raise LogError(f"{name}: version {found} of the log, and this program reads version {VERSION}")
    rows: list[AnyRow] = []
    count = 0
    at, view = len(HEADER), memoryview(data)
    while at < len(view):
        damage = ""
        size = int.from_bytes(view[at : at + 4], "little")
        end = at + 8 + size
        if not size and not any(view[at:]):
            break
        if at + 4 > len(view) or (size <= MAX_ROW_BYTES and end > len(view)):
            damage = "the file ends inside of a row"
        elif size > MAX_ROW_BYTES:
            damage = f"a row of {size} bytes"
        elif zlib.crc32(view[at : end - 4]) != int.from_bytes(view[end - 4 : end], "little"):
            damage = "its checksum is wrong"
        else:
            try:
                row = _decode(view[at + 4 : end - 4])
                count += 1
                if keep(row):
                    rows.append(row)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                damage = f"unknown contents ({error})"
        if damage:
            return Log(rows, f"{name}: damaged at byte {at}, after {count} rows: {damage}")
        at = end
    return Log(rows)


def read_log(path: Path) -> Log:
    """The rows of a file. Raises LogError."""
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise LogError(f"{path}: over the limit of {MAX_LOG_BYTES} bytes")
        return read_rows(path.read_bytes(), str(path))
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from None


class LogFile:
    """A log being written, readable by its owner alone. It never has more than `most` bytes, together with the file
    before it, whose name ends in ".1". Each row is copied into a mapped part of the file: it costs no system call, and
    a process that dies leaves all its rows.

    A file that is there and was not closed is what a crash has left: it is kept as ".crash".
    """

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most, self._size = path, most // 2, 0
        self._window: mmap.mmap | None = None  # from _first up to _end of the file
        self._first = self._end = 0
        self.broken = ""  # why no more is written
        try:
            self._lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._keep_crash()
            self._file = self._open()
        except BlockingIOError:
            raise LogError(f"record: {path} is being written by another engine") from None
        except OSError as error:
            raise LogError(f"record: {path}: {error.strerror}") from None

    def is_full(self, size: int) -> bool:
        """Whether a row of `size` bytes needs a new file."""
        return self._size > len(HEADER) and self._size + size > self._most

    def turn(self) -> None:
        """Begin a new file; the one before last is lost."""
        self._end_file()
        os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        self._file = self._open()

    def write(self, frame: bytes) -> None:
        """Add a row. After an error of the file system nothing more is written."""
        if self.broken:
            return
        at, end = self._size, self._size + len(frame)
        try:
            if end > self._end:
                self._map(end)
            if self._window is None:
                os.pwrite(self._file, frame, at)
            else:
                self._window[at - self._first : end - self._first] = frame
            self._size = end
        except OSError as error:
            self.broken = f"record: {self._path}: {error.strerror}; nothing more is recorded"

    def close(self) -> None:
        self._end_file()
        os.close(self._lock)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o600)
        os.fchmod(file, 0o600)
        os.write(file, HEADER)
        self._size, self._end = len(HEADER), 0
        return file

    def _end_file(self) -> None:
        """Close the file at the end of what is written."""
        self._unmap()
        os.ftruncate(self._file, self._size)
        os.close(self._file)

    def _map(self, end: int) -> None:
        """Map the part of the file where rows come next, at least up to `end`. Its space on the disk is taken before:
        a write to a mapped page without any would kill the process. Where a file system has no such space or maps,
        rows are written one by one."""
        self._unmap()
        first = self._size - self._size % mmap.ALLOCATIONGRANULARITY
        self._first, self._end = first, max(end, min(first + WINDOW_BYTES, self._most))
        try:
            os.posix_fallocate(self._file, first, self._end - first)
            self._window = mmap.mmap(self._file, self._end - first, offset=first)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise

    def _unmap(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None

    def _keep_crash(self) -> None:
        """Keep what a process has left that did not end in order."""
        closed = framed(encode(Closed(0)))
        if not self._path.exists() or self._path.stat().st_size <= len(HEADER):
            return
        with self._path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise LogError(f"record: {self._path} is there and is no log: name another file")
            # A row of Closed: at least its frame and tag, at most nine bytes of time more.
            file.seek(max(0, self._path.stat().st_size - len(closed) - 9))
            tail = file.read()
        if not any(_is_closed(tail[i:]) for i in range(len(tail))):
            os.replace(self._path, self._path.with_name(self._path.name + ".crash"))


def _is_closed(data: bytes) -> bool:
    try:
        log = read_rows(HEADER + data)
    except LogError:
        return False
    return not log.damage and log.closed and len(log.rows) == 1
