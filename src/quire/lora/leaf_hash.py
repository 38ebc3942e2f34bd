"""SHA-256 of a file by leaves, which two threads take in turns while the file is read.

The digest is that of the digests of all leaves, LEAF bytes each but the last. Leaves are read one after the other,
while another thread has the page cache hold what comes next. Whoever needs bytes of the file hashes on until they are
there, or reads them by itself and takes leaves afterwards; so one thread hashes while another one packs numbers.

A file that had rested when it was hashed, and has not been written to since, is read and not hashed again. Its times
say so: the kernel sets the time of the last change, which no program can choose. They can be equal before and after a
write if both are within one tick of the clock, and a page that a program has mapped is written to without a new time
until it has been brought to the disk, which begins after 30 s; so what rests has had its times for REST_NS.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from quire.types import CheckpointError
from quire.util.files import Identity, identity_of, open_regular

LEAF = (
    2**20
)  # bytes; with smaller ones threads wait more for Python's lock, which each needs between two leaves
_AHEAD = 2**26  # bytes that are read in one call, without that lock
REST_NS = 90 * 10**9


class Known(NamedTuple):
    """A digest, and what it is of."""

    head: bytes
    file: Identity
    changed_ns: int
    digest: str


class Memory:
    """The last digest of a file that rested, for those who read it again and again."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: Known | None = None


class LeafHash:
    """The digest of a file that is open; one thread calls it, others read ahead and hash beside it from now on.

    `memory` is where its digest is looked up and kept. Raises CheckpointError if the file cannot be opened, or changes.
    """

    def __init__(self, path: Path, memory: Memory | None = None) -> None:
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from None
        self._where, self._memory = path.name, memory or Memory()
        self._identity, self._changed_ns = identity_of(self._file), self._changed_at()
        self._rests = time.time_ns() - max(self._identity.written_ns, self._changed_ns) >= REST_NS
        known = self._memory.known
        self.known = known if known and known[1:3] == (self._identity, self._changed_ns) else None
        self._leaves = [b""] * (0 if self.known else -(-self._identity.size // LEAF))
        self._taken, self._lock, self._closed = 0, Lock(), False
        self._buffer = memoryview(bytearray(LEAF))
        self._pool = ThreadPoolExecutor(2, "leaves")
        self._pool.submit(self._read_ahead)
        self._beside = self._pool.submit(self._reach, len(self._leaves), memoryview(bytearray(LEAF)))

    @property
    def file(self) -> int:
        """The open file, whose content the digest is of."""
        return self._file.fileno()

    def reach(self, end: int) -> None:
        """Hash until all leaves before byte `end` have been read, or are being read."""
        self._reach(min(-(-end // LEAF), len(self._leaves)), self._buffer)

    def digest(self, head: bytes, read: Identity) -> str:
        """The digest of `head` and the file, unless that is not as it was when it was opened, here and to be `read`."""
        self._reach(len(self._leaves), self._buffer)
        self._beside.result()
        if not read == self._identity == identity_of(self._file):
            raise self._error()
        if self.known is not None:
            if self.known.head != head:
                raise CheckpointError(f"{self._where}: what lies beside it changed since it was loaded")
            return self.known.digest
        total = hashlib.sha256(b"%d %d " % (len(head), self._identity.size) + head)
        total.update(b"".join(self._leaves))
        if self._rests:
            self._memory.known = Known(head, self._identity, self._changed_ns, total.hexdigest())
        return total.hexdigest()

    def close(self) -> None:
        """End the thread and close the file."""
        with self._lock:
            self._taken, self._closed = len(self._leaves), True
        self._pool.shutdown()
        self._file.close()

    def _reach(self, stop: int, buffer: memoryview) -> None:
        while (leaf := self._take(stop)) is not None:
            first = leaf * LEAF
            room, done = buffer[: min(LEAF, self._identity.size - first)], 0
            while done < len(room):
                got = os.preadv(self._file.fileno(), [room[done:]], first + done)
                if not got:
                    raise self._error()
                done += got
            self._leaves[leaf] = hashlib.sha256(room).digest()

    def _read_ahead(self) -> None:
        """Have the page cache hold the file, in order. Sent to nowhere it is read by small pieces in one call: what the
        kernel reads ahead for best, and without a copy. Whoever needs the bytes finds out what is wrong with them.
        """
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            at = 0
            while at < self._identity.size and not self._closed:
                sent = os.sendfile(nowhere.fileno(), self._file.fileno(), at, _AHEAD)
                if not sent:
                    return
                at += sent

    def _take(self, stop: int) -> int | None:
        """The next leaf before `stop` that nobody has taken."""
        with self._lock:
            if self._taken >= stop:
                return None
            self._taken += 1
            return self._taken - 1

    def _changed_at(self) -> int:
        return os.fstat(self._file.fileno()).st_ctime_ns

    def _error(self) -> CheckpointError:
        return CheckpointError(f"{self._where}: the file changed while it was read")
