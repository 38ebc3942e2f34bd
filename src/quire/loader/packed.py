"""Packed weights on disk, written once and mapped by the next start.

    the weights in the layout of the executor, from the first byte on (so that they are mapped at a page)
    a 64-bit checksum per 4 MiB of weights
    a JSON object: key, time, and facts about the model
    64 bytes: magic, the three lengths, and SHA-256 of checksums and JSON

A file is written under a temporary name and renamed once it is on disk, so that no start sees an incomplete one. It is
used if its length, its key and every checksum are right, and removed otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from quire.program.tensors import Param
from quire.util.beside import beside
from quire.util.kept import DamagedError, KeptFiles

SUFFIX = ".weights"
_TAIL = struct.Struct("<8sQQQ32s")  # magic, bytes of weights, of checksums, of JSON; digest
_MAGIC = b"QUIREPK1"
_MAX_META_BYTES = 2**20
_SAVED_AT_ONCE = 16  # chunks between two reports of progress

Progress = Callable[[int, int], None]


class Packer(Protocol):
    """The owner of packed weights: a native executor."""

    @property
    def layout(self) -> str:
        """Everything that determines the packed bytes besides the program and its weights."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights, a whole number of pages."""

    @property
    def weight_chunks(self) -> int:
        """Number of chunks for saving and verifying."""

    def put_in_file(self, fd: int) -> Callable[[], None]:
        """Have weights that are put from now on in a file in place of memory, which is made as long as they are.
        Returns what gives back the memory that they have meanwhile. Raises OSError."""

    def save_weights(self, fd: int, first: int, count: int) -> bytes:
        """Write chunks to their place in a file; return 8 bytes of checksum each. Raises OSError."""

    def map_weights(self, fd: int, sums: bytes) -> bool:
        """Map the weights from a file instead of `put`; false, without a change, if a checksum differs."""


def packed_key(params: Sequence[Param], layout: str, files: str) -> str:
    """The key of packed weights, a digest of everything that determines them. `files` is a fingerprint."""
    digest = hashlib.sha256(f"{layout}\0{files}\0".encode())
    for param in params:
        digest.update(repr(param).encode())
    return digest.hexdigest()


class PackedWeights(KeptFiles):
    """A folder of packed weights."""

    __slots__ = ()

    def path(self, key: str) -> Path:
        """The path for the packed weights of a key."""
        return self.folder / f"{key[:40]}{SUFFIX}"

    def restore(
        self, key: str, packer: Packer, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, Any] | None:
        """Map the weights of a key and return the facts stored with them, or None if they do not exist.

        `meanwhile` is called while they are verified. It is not called if they do not exist.

        Raises DamagedError and removes the file, without mapping anything, if they were changed.
        """
        path = self.path(key)
        try:
            with self.opened(path) as file:
                if file is None:
                    return None
                fd = file.fileno()
                sums, facts = _read_end(fd, key, packer)
                if not beside(lambda: packer.map_weights(fd, sums), meanwhile):
                    raise DamagedError("a checksum differs")
                return facts
        except DamagedError as error:
            raise DamagedError(f"packed weights {path.name}: {error}: packed again") from None

    def store(
        self,
        key: str,
        packer: Packer,
        facts: Mapping[str, Any],
        progress: Progress | None = None,
        put: Callable[[int], None] = lambda _: None,
    ) -> threading.Thread:
        """Write the weights of a key with `facts` about them. `progress(done, total)` gets bytes. `put` is called with
        the file first, and may put the weights, and complete the facts.

        The returned thread syncs the file to disk and renames it. Raises OSError with the reason; no partial file is
        left.
        """
        size = packer.weight_bytes

        def fill(fd: int) -> None:
            put(fd)
            sums = []
            for first in range(0, packer.weight_chunks, _SAVED_AT_ONCE):
                count = min(_SAVED_AT_ONCE, packer.weight_chunks - first)
                sums.append(packer.save_weights(fd, first, count))
                if progress is not None:
                    progress(size * (first + count) // packer.weight_chunks, size)
            _write_end(fd, size, b"".join(sums), {**facts, "key": key, "created": int(time.time())})

        return self.write(self.path(key), size, fill)


def _write_end(fd: int, size: int, sums: bytes, facts: dict[str, Any]) -> None:
    meta = json.dumps(facts).encode()
    tail = _TAIL.pack(_MAGIC, size, len(sums), len(meta), hashlib.sha256(sums + meta).digest())
    data, offset = sums + meta + tail, size
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _read_end(fd: int, key: str, packer: Packer) -> tuple[bytes, dict[str, Any]]:
    """Checksums and facts of an open file. Raises DamagedError unless it belongs to the packer and `key`."""
    end = os.fstat(fd).st_size
    tail = os.pread(fd, _TAIL.size, max(0, end - _TAIL.size))
    if len(tail) != _TAIL.size:
        raise DamagedError("it is truncated")
    magic, weights, sums_bytes, meta_bytes, digest = _TAIL.unpack(tail)
    size, rest = packer.weight_bytes, sums_bytes + meta_bytes
    expected = (_MAGIC, size, 8 * packer.weight_chunks)
    if (
        (magic, weights, sums_bytes) != expected
        or size + rest + len(tail) != end
        or meta_bytes > _MAX_META_BYTES
    ):
        raise DamagedError("it is truncated, or its name is wrong")
    data = os.pread(fd, rest, size)
    if hashlib.sha256(data).digest() != digest:
        raise DamagedError("its last part was changed")
    facts: dict[str, Any] = json.loads(data[sums_bytes:])
    if facts.get("key") != key:
        raise DamagedError("it belongs to another model")
    return data[:sums_bytes], facts
