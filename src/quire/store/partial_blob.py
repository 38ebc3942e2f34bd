"""A file that is arriving: in segments, resumable after a kill, verified before it becomes a blob.

One file holds the data and, behind it, where each segment begins, ends and is. Data is written first, so that a process
that is killed never claims bytes that are not there. (After a power cut it may: the digest tells.) The lock on the file
is between processes: one fetches, the others wait for the blob.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from quire.records import dataclass
from quire.store.manifests import StoredFile

SEGMENT_BYTES = 32 * 2**20  # at least, where a file is fetched over several connections
_ENTRY = struct.Struct("<QQQ")
_READ_BYTES = 4 * 2**20


@dataclass(slots=True)
class Segment:
    """Bytes `begin` to `end` of a file, of which those before `at` are there."""

    begin: int
    end: int
    at: int


class PartialBlob:
    """An arriving file, which this process has locked. Close it."""

    def __init__(self, path: Path, fd: int, size: int, connections: int) -> None:
        self._path, self._fd, self._size = path, fd, size
        self.segments = self._resumed()
        self.resumed = sum(segment.at - segment.begin for segment in self.segments)
        if not self.segments:
            self.restart(connections)

    @classmethod
    def locked(cls, folder: Path, file: StoredFile, connections: int) -> PartialBlob | None:
        """Open or make the file, or return None while another process has it."""
        path = folder / file.key
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.fstat(fd).st_ino == path.stat().st_ino:
                return cls(path, fd, file.size, connections)
        except BlockingIOError:
            pass  # it is being fetched
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it has just become a blob, or is being fetched
        return None

    def restart(self, connections: int) -> None:
        """Forget what has arrived."""
        count = min(connections, max(1, self._size // SEGMENT_BYTES))
        edges = [self._size * i // count for i in range(count + 1)]
        self.segments = [Segment(a, b, a) for a, b in pairwise(edges)]
        os.ftruncate(self._fd, 0)
        entries = b"".join(_ENTRY.pack(s.begin, s.end, s.at) for s in self.segments)
        _write_at(self._fd, entries, self._size)

    def write(self, segment: Segment, data: bytes) -> None:
        """Append to a segment. Raises OSError if the disk is full."""
        _write_at(self._fd, data, segment.at)
        segment.at += len(data)
        number = next(i for i, one in enumerate(self.segments) if one is segment)
        _write_at(
            self._fd,
            _ENTRY.pack(segment.begin, segment.end, segment.at),
            self._size + number * _ENTRY.size,
        )

    def digest(self, promised: str) -> tuple[str, str]:
        """SHA-256 of the data, and its digest of the kind that was promised; see `digests`."""
        return digests(self._fd, self._size, promised)

    def settle(self) -> int:
        """Bring the data to the disk, and nothing else; returns its time (ns)."""
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)
        return os.fstat(self._fd).st_mtime_ns

    def become(self, blob: Path) -> None:
        """Move the data to where blobs are."""
        self._path.replace(blob)

    def discard(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let others have it."""
        os.close(self._fd)

    def _resumed(self) -> list[Segment]:
        """The segments that an earlier process has left; none if they do not make up the file."""
        length = os.fstat(self._fd).st_size - self._size
        if length == 0:  # it was whole, and about to become a blob
            return [Segment(0, self._size, self._size)]
        if length < 0 or length % _ENTRY.size or length > 1024 * _ENTRY.size:
            return []
        found = [Segment(*entry) for entry in _ENTRY.iter_unpack(os.pread(self._fd, length, self._size))]
        ends = [0, *(segment.end for segment in found)]
        whole = ends[-1] == self._size and all(
            begin == segment.begin <= segment.at <= segment.end
            for begin, segment in zip(ends, found, strict=False)
        )
        return found if whole else []


def digests(fd: int, size: int, promised: str, read: Callable[[int], None] | None = None) -> tuple[str, str]:
    """SHA-256 of the first `size` bytes of a file, and their digest of the kind of `promised`, "git:…" or "sha256:…".

    `read` gets the bytes read since the last call.
    """
    sha256, git = hashlib.sha256(), None
    if promised.startswith("git:"):
        git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    at = 0
    while at < size and (data := os.pread(fd, min(_READ_BYTES, size - at), at)):
        sha256.update(data)
        if git is not None:
            git.update(data)
        at += len(data)
        if read is not None:
            read(len(data))
    found = sha256.hexdigest()
    return found, f"git:{git.hexdigest()}" if git is not None else f"sha256:{found}"


def _write_at(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count
