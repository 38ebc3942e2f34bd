"""A file of KV blocks: places of one size behind a table that names what is in each.

    header     4096 bytes: magic, version, fingerprint, bytes of a block, number of places
    table      64 bytes a place: digest, cache group, order of writing, check sum
    contents   one place after the other, whole pages

A place is written in two steps, content and then record, and its check sum covers both with the fingerprint as key. So
a process may be killed at any moment, a disk may flip bits and another process may write over a place while it is read:
what does not fit its record is not served. Nothing is flushed, as a record that outlives its content is found out.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.records import dataclass
from quire.types import QuireError

U8 = NDArray[np.uint8]
PAGE = 4096
_MAGIC = b"quire kv blocks\n"
_VERSION = 1
_HEADER = struct.Struct("<16sI64sQQ")
_RECORD = struct.Struct("<16sQQ16s16x")
_TABLE = np.dtype([("digest", "V16"), ("group", "<u8"), ("order", "<u8"), ("sum", "V16"), ("unused", "V16")])
RECORD_BYTES = _RECORD.size
MOST_FILES = 64  # of one folder


class KvFileError(QuireError):
    """A file of blocks that cannot be made, opened or written."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What is in a file: blocks of `block_bytes` that `fingerprint` (64 bytes) determines, in `places`."""

    fingerprint: bytes
    block_bytes: int
    places: int

    @property
    def pitch(self) -> int:
        """Bytes from one place to the next."""
        return -(-self.block_bytes // PAGE) * PAGE

    @property
    def contents(self) -> int:
        """Where the first place begins."""
        return PAGE + -(-self.places * RECORD_BYTES // PAGE) * PAGE

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.contents + self.places * self.pitch

    def header(self) -> bytes:
        """The first page."""
        packed = _HEADER.pack(_MAGIC, _VERSION, self.fingerprint, self.block_bytes, self.places)
        return packed.ljust(PAGE, b"\0")


def places_in(size: int, block_bytes: int) -> int:
    """Places of a file of at most `size` bytes."""
    pitch = KvLayout(b"", block_bytes, 0).pitch
    return max(0, (size - 2 * PAGE) // (pitch + RECORD_BYTES))


class KvFile:
    """An open file of blocks. Calls for different places may come from different threads."""

    def __init__(self, path: Path, fd: int, layout: KvLayout) -> None:
        self.path, self.layout = path, layout
        self._fd = fd

    @classmethod
    def own(cls, folder: Path, layout: KvLayout) -> KvFile:
        """A file of a folder that no process has, for this one to write: if there is one, with blocks of the same
        layout, which are kept. Raises KvFileError."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            paths = [folder / f"blocks-{number}.kv" for number in range(MOST_FILES)]
            there = [path for path in paths if path.exists()]
            for path, of_same in [*((path, True) for path in there), *((path, False) for path in paths)]:
                file = cls(path, _opened(path, os.O_RDWR | os.O_CREAT), layout)
                try:
                    if file._take(of_same=of_same):
                        return file
                except BaseException:
                    file.close()
                    raise
                file.close()
        except OSError as error:
            raise KvFileError(f"{folder}: {error.strerror or error}") from None
        raise KvFileError(f"{folder}: {MOST_FILES} processes write blocks here already")

    @classmethod
    def of_another(cls, path: Path, layout: KvLayout) -> KvFile | None:
        """A file that another process writes, or wrote, to read; None if its blocks are of something else."""
        try:
            fd = _opened(path, os.O_RDONLY)
        except OSError:
            return None
        found = _header(fd)
        if found is None or (found.fingerprint, found.block_bytes) != (
            layout.fingerprint,
            layout.block_bytes,
        ):
            os.close(fd)
            return None
        return cls(path, fd, found)

    def _take(self, *, of_same: bool) -> bool:
        """Lock the file and have it be of the layout, with all of its room; False if another process has it, or if it
        is to be of the layout already and is not."""
        header, fd = self.layout.header(), self._fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        same = os.pread(fd, PAGE, 0) == header and os.fstat(fd).st_size == self.layout.size
        if of_same or same:
            return same
        os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, self.layout.size)
        os.pwrite(fd, header, 0)
        return True

    def table(self, after: int = 0) -> tuple[list[tuple[int, bytes, int]], int]:
        """Place, digest and group of every record of a higher order, the oldest first, and the order of the newest
        one, or `after`. Contents are not read: some may not fit."""
        raw = os.pread(self._fd, self.layout.places * RECORD_BYTES, PAGE)
        records: Any = np.frombuffer(raw[: len(raw) // RECORD_BYTES * RECORD_BYTES], _TABLE)
        used = np.flatnonzero(records["order"] > after)
        used = used[np.argsort(records["order"][used], kind="stable")]
        digests, groups = records["digest"].tobytes(), records["group"]
        found = [
            (place, digests[16 * place : 16 * place + 16], int(groups[place])) for place in used.tolist()
        ]
        return found, int(records["order"][used[-1]]) if found else after

    def write(self, place: int, digest: bytes, group: int, order: int, content: U8) -> None:
        """Put a block into a place. Raises OSError."""
        data = memoryview(content)  # type: ignore[arg-type]
        offset = self.layout.contents + place * self.layout.pitch
        while data:
            done = os.pwrite(self._fd, data, offset)
            data, offset = data[done:], offset + done
        check = self._sum(digest, group, order, content)
        os.pwrite(self._fd, _RECORD.pack(digest, group, order, check), PAGE + place * RECORD_BYTES)

    def read(self, place: int, digest: bytes, group: int, into: U8) -> bool:
        """Read a block; whether it is the one that is named, whole and as it was written. Raises OSError."""
        raw = os.pread(self._fd, RECORD_BYTES, PAGE + place * RECORD_BYTES)
        found, its_group, order, check = _RECORD.unpack(raw.ljust(RECORD_BYTES, b"\0"))
        if (found, its_group) != (digest, group):
            return False
        offset, done = self.layout.contents + place * self.layout.pitch, 0
        view = memoryview(into)  # type: ignore[arg-type]
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if not got:
                return False
            done += got
        return bool(self._sum(digest, group, order, into) == check)

    def erase(self, place: int) -> None:
        """Have the table name nothing in a place. Raises OSError."""
        os.pwrite(self._fd, bytes(RECORD_BYTES), PAGE + place * RECORD_BYTES)

    def close(self) -> None:
        """Close the file, and let another process have it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _sum(self, digest: bytes, group: int, order: int, content: U8) -> bytes:
        found = blake2b(digest, digest_size=16, key=self.layout.fingerprint)
        found.update(group.to_bytes(8, "little") + order.to_bytes(8, "little"))
        found.update(memoryview(content))  # type: ignore[arg-type]
        return found.digest()


def _opened(path: Path, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path.name} is not a regular file")
    return fd


def _header(fd: int) -> KvLayout | None:
    raw = os.pread(fd, PAGE, 0)
    if len(raw) < PAGE:
        return None
    magic, version, fingerprint, block_bytes, places = _HEADER.unpack_from(raw)
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    found = KvLayout(fingerprint, block_bytes, places)
    return found if os.fstat(fd).st_size == found.size else None
