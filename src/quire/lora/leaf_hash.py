"""SHA-256 of a file by leaves, which two threads take in turns while the file is read.

The digest is that of the digests of all leaves, LEAF bytes each but the last. Leaves are read one after the other,
which is what the kernel reads ahead for. Whoever needs bytes of the file hashes until they have been read, so one
thread hashes while another waits for the disk, looks at numbers, or packs them.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from quire.types import CheckpointError
from quire.util.files import Identity, identity_of, open_regular

LEAF = 2**18  # bytes; a leaf stays in the L2 cache between reading and hashing


class LeafHash:
    """The digest of a file that is open; one thread calls it, another one hashes beside it from now on.

    Raises CheckpointError if the file cannot be opened, or changes.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from None
        self._where, self._identity = path.name, identity_of(self._file)
        self._leaves = [b""] * -(-self._identity.size // LEAF)
        self._taken, self._lock = 0, Lock()
        self._buffer = memoryview(bytearray(LEAF))
        self._pool = ThreadPoolExecutor(1, "leaves")
        self._beside = self._pool.submit(self._reach, len(self._leaves), memoryview(bytearray(LEAF)))

    def reach(self, end: int) -> None:
        """Hash until all leaves before byte `end` have been read, or are being read."""
        self._reach(min(-(-end // LEAF), len(self._leaves)), self._buffer)

    def digest(self, head: bytes, read: Identity) -> str:
        """The digest of `head` and the file, unless that is not as it was when it was opened, here and to be `read`."""
        self._reach(len(self._leaves), self._buffer)
        self._beside.result()
        if not read == self._identity == identity_of(self._file):
            raise self._changed()
        total = hashlib.sha256(b"%d %d " % (len(head), self._identity.size) + head)
        total.update(b"".join(self._leaves))
        return total.hexdigest()

    def close(self) -> None:
        """End the thread and close the file."""
        with self._lock:
            self._taken = len(self._leaves)
        self._pool.shutdown()
        self._file.close()

    def _reach(self, stop: int, buffer: memoryview) -> None:
        while (leaf := self._take(stop)) is not None:
            first = leaf * LEAF
            room = buffer[: min(LEAF, self._identity.size - first)]
            if os.preadv(self._file.fileno(), [room], first) != len(room):
                raise self._changed()
            self._leaves[leaf] = hashlib.sha256(room).digest()

    def _take(self, stop: int) -> int | None:
        """The next leaf before `stop` that nobody has taken."""
        with self._lock:
            if self._taken >= stop:
                return None
            self._taken += 1
            return self._taken - 1

    def _changed(self) -> CheckpointError:
        return CheckpointError(f"{self._where}: the file changed while it was read")
