"""A file of KV blocks: places of one size behind a table that names what is in each.

    header     4096 bytes: magic, version, fingerprint, bytes of a block, number of places, mark of the key
    table      64 bytes a place: digest, cache group, order of writing, check sum, owner, nonce
    contents   one place after the other, whole pages

A place is written in two steps, content and then record, and its check sum (worker.content_sums) covers both with the
fingerprint as key. So a process may be killed at any moment, a disk may flip bits and another process may write over a
place while it is read: what does not fit its record is not served. Nothing is flushed, as a record that outlives its
content is found out.

With a key (worker.sealing) contents are encrypted: a tag is the check sum, and digests are hashed with the key.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.tier import Name
from quire.records import dataclass
from quire.types import QuireError
from quire.worker.content_sums import ContentSums
from quire.worker.sealing import Sealing

U8 = NDArray[np.uint8]
PAGE = 4096
_MAGIC = b"quire kv blocks\n"
_VERSION = 4
_HEADER = struct.Struct("<16sI64sQQ16s")
_RECORD = struct.Struct("<16sIQ16s8s12s")
_TABLE = np.dtype(
    [("digest", "V16"), ("group", "<u4"), ("order", "<u8"), ("sum", "V16"), ("owner", "V8"), ("nonce", "V12")]
)
OWNER_BYTES = 8
RECORD_BYTES = _RECORD.size
MOST_FILES = 64  # of one folder


class KvFileError(QuireError):
    """A file of blocks that cannot be made, opened or written."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What is in a file: blocks of `block_bytes` that `fingerprint` (64 bytes) determines, in `places`. `mark` (16
    bytes) is of the key."""

    fingerprint: bytes
    block_bytes: int
    places: int
    mark: bytes = bytes(16)

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
        packed = _HEADER.pack(_MAGIC, _VERSION, self.fingerprint, self.block_bytes, self.places, self.mark)
        return packed.ljust(PAGE, b"\0")


def places_in(size: int, block_bytes: int) -> int:
    """Places of a file of at most `size` bytes."""
    pitch = KvLayout(b"", block_bytes, 0).pitch
    return max(0, (size - 2 * PAGE) // (pitch + RECORD_BYTES))


class KvFile:
    """An open file of blocks. Calls for different places may come from different threads."""

    def __init__(self, path: Path, fd: int, layout: KvLayout, sealing: Sealing | None = None) -> None:
        self.path, self.layout = path, layout
        self._fd, self._sealing = fd, sealing
        self._sums = ContentSums(layout.fingerprint)

    @classmethod
    def own(cls, folder: Path, layout: KvLayout, sealing: Sealing | None = None) -> KvFile:
        """A file of a folder that no process has, for this one to write: if there is one, with blocks of the same
        layout, which are kept. Raises KvFileError."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            paths = [folder / f"blocks-{number}.kv" for number in range(MOST_FILES)]
            there = [path for path in paths if path.exists()]
            for path, of_same in [*((path, True) for path in there), *((path, False) for path in paths)]:
                file = cls(path, _opened(path, os.O_RDWR | os.O_CREAT), layout, sealing)
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
    def of_another(cls, path: Path, layout: KvLayout, sealing: Sealing | None = None) -> KvFile | None:
        """A file that another process writes, or wrote, to read; None if its blocks are of something else."""
        try:
            fd = _opened(path, os.O_RDONLY)
        except OSError:
            return None
        found = _header(fd)
        if found is None or replace(found, places=layout.places) != layout:
            os.close(fd)
            return None
        return cls(path, fd, found, sealing)

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

    def named(self, digest: bytes) -> bytes:
        """What stands for a digest in the table."""
        return digest if self._sealing is None else self._sealing.name(digest)

    def table(self, after: int = 0) -> tuple[list[tuple[int, bytes, int, bytes]], int]:
        """Place, digest as it is named there, group and owner of every record of a higher order, the oldest first, and
        the order of the newest one, or `after`. Contents are not read: some may not fit."""
        raw = os.pread(self._fd, self.layout.places * RECORD_BYTES, PAGE)
        records: Any = np.frombuffer(raw[: len(raw) // RECORD_BYTES * RECORD_BYTES], _TABLE)
        used = np.flatnonzero(records["order"] > after)
        used = used[np.argsort(records["order"][used], kind="stable")]
        digests, groups, owners = records["digest"].tobytes(), records["group"], records["owner"].tobytes()
        found = [
            (
                place,
                digests[16 * place : 16 * place + 16],
                int(groups[place]),
                owners[8 * place : 8 * place + 8],
            )
            for place in used.tolist()
        ]
        return found, int(records["order"][used[-1]]) if found else after

    def write(
        self, place: int, name: Name, order: int, content: U8, owner: bytes = bytes(OWNER_BYTES)
    ) -> None:
        """Put a block, which is named as in the table, into a place. Raises OSError."""
        data = memoryview(content)  # type: ignore[arg-type]
        further, nonce = _further(name, order, owner), bytes(12)
        if self._sealing is None:
            check = self._sums.of(further, data)
        else:
            nonce, data, check = self._sealing.seal(data, further)
        offset = self.layout.contents + place * self.layout.pitch
        while data:
            done = os.pwrite(self._fd, data, offset)
            data, offset = data[done:], offset + done
        record = _RECORD.pack(*name, order, check, owner, nonce)
        os.pwrite(self._fd, record, PAGE + place * RECORD_BYTES)

    def read(self, place: int, name: Name, into: U8) -> bool:
        """Read a block; whether it is the one that is named, as in the table, whole and as it was written. Raises
        OSError."""
        raw = os.pread(self._fd, RECORD_BYTES, PAGE + place * RECORD_BYTES)
        found, group, order, check, owner, nonce = _RECORD.unpack(raw.ljust(RECORD_BYTES, b"\0"))
        if (found, group) != name:
            return False
        offset, done = self.layout.contents + place * self.layout.pitch, 0
        whole = memoryview(into)  # type: ignore[arg-type]
        view = whole if self._sealing is None else self._sealing.room()
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if not got:
                return False
            done += got
        further = _further(name, order, owner)
        if self._sealing is not None:
            return self._sealing.open(nonce, check, further, whole)
        return self._sums.fits(further, whole, check)

    def erase(self, place: int) -> None:
        """Have the table name nothing in a place. Raises OSError."""
        os.pwrite(self._fd, bytes(RECORD_BYTES), PAGE + place * RECORD_BYTES)

    def close(self) -> None:
        """Close the file, and let another process have it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _further(name: Name, order: int, owner: bytes) -> bytes:
    """What a check sum covers besides the content."""
    return name[0] + name[1].to_bytes(8, "little") + order.to_bytes(8, "little") + owner


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
    magic, version, fingerprint, block_bytes, places, mark = _HEADER.unpack_from(raw)
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    found = KvLayout(fingerprint, block_bytes, places, mark)
    return found if os.fstat(fd).st_size == found.size else None
