"""Packed weights on disk: what packing made, written once and mapped by the next start.

    the weights as the executor holds them, from the first byte on (so that they are mapped at a page)
    a 64-bit checksum of each 4 MiB of them
    a JSON object: key, time, and what the packer's owner says of the model
    64 bytes: magic, the three lengths, and SHA-256 of checksums and JSON

A file is written under another name and renamed when it is on the disk, so that no start sees half of one. It is
used when its length, its key and every checksum are right, and removed otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quire.program.ops import Param
from quire.util.beside import beside
from quire.util.files import IrregularFileError, open_regular
from quire.util.sizes import format_size

SUFFIX = ".weights"
_UNFINISHED = ".writing-"
_TAIL = struct.Struct("<8sQQQ32s")  # magic, bytes of weights, of checksums, of JSON; digest
_MAGIC = b"QUIREPK1"
_MAX_META_BYTES = 2**20
_SAVED_AT_ONCE = 16  # chunks between two reports of progress
_SPARE_BYTES = 2**30  # room that a copy must leave on the disk

Progress = Callable[[int, int], None]


class Packer(Protocol):
    """What holds packed weights: a native executor."""

    @property
    def layout(self) -> str:
        """What the packed bytes depend on beside the program and its weights."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights, a whole number of pages."""

    @property
    def weight_chunks(self) -> int:
        """Chunks that they are saved and checked in."""

    def save_weights(self, fd: int, first: int, count: int) -> bytes:
        """Write chunks to their place in a file; 8 bytes of checksum each. OSError when that fails."""

    def map_weights(self, fd: int, sums: bytes) -> bool:
        """Take the weights from a file instead of `put`; false, and nothing taken, when a checksum differs."""


class DamagedError(Exception):
    """A packed file that must not be used; says why."""


def packed_key(params: Sequence[Param], layout: str, files: str) -> str:
    """The name of packed weights: all that their bytes depend on. `files` is a fingerprint of the checkpoint."""
    digest = hashlib.sha256(f"{layout}\0{files}\0".encode())
    for param in params:
        digest.update(repr(param).encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A folder of packed weights, at most `limit` bytes of them; the least recently used go first.

    Several processes may use it at once. Only files of this user or of root are read, and none that others may
    write to.
    """

    folder: Path
    limit: int

    def path(self, key: str) -> Path:
        """Where the packed weights of a key are, or would be."""
        return self.folder / f"{key[:40]}{SUFFIX}"

    def restore(
        self, key: str, packer: Packer, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, Any] | None:
        """Map the weights of a key; the facts they were stored with, or None when there are none.

        `meanwhile` is called while they are checked. It is not called when there are none.

        Raises DamagedError, with nothing taken and the file removed, when they are not as they were written.
        """
        path = self.path(key)
        try:
            file = open_regular(path, os.O_NOFOLLOW)
        except OSError:
            return None
        except IrregularFileError:
            raise _removed(path, "it is not a regular file") from None
        with file:
            fd = file.fileno()
            try:
                sums, facts = _read_end(fd, key, packer)
                if not beside(lambda: packer.map_weights(fd, sums), meanwhile):
                    raise DamagedError("a checksum differs")
            except DamagedError as error:
                raise _removed(path, str(error)) from None
            with contextlib.suppress(OSError):  # a read-only folder, such as an image's
                os.utime(fd)
            return facts

    def store(
        self, key: str, packer: Packer, facts: Mapping[str, Any], progress: Progress | None = None
    ) -> threading.Thread:
        """Write the weights of a key and `facts` about them, after making room. `progress(done, total)`: bytes.

        The thread that is returned brings the file to the disk and gives it its name; the interpreter waits for it
        before it ends. Raises OSError saying what failed, with nothing left behind.
        """
        size = packer.weight_bytes
        self._make_room(size)
        fd, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=self.folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # tells a sweep that its writer lives
            sums = []
            for first in range(0, packer.weight_chunks, _SAVED_AT_ONCE):
                count = min(_SAVED_AT_ONCE, packer.weight_chunks - first)
                sums.append(packer.save_weights(fd, first, count))
                if progress is not None:
                    progress(size * (first + count) // packer.weight_chunks, size)
            _write_end(fd, size, b"".join(sums), {**facts, "key": key, "created": int(time.time())})
        except BaseException:
            os.unlink(name)
            os.close(fd)
            raise
        finishing = threading.Thread(
            target=self._finish, args=(fd, Path(name), self.path(key)), name="quire-packed-weights"
        )
        finishing.start()
        return finishing

    def sizes(self) -> dict[str, int]:
        """Bytes of each packed file by its name."""
        return {path.name: status.st_size for path, status in self._files()}

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """The packed files, least recently used first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"*{SUFFIX}"):
                with contextlib.suppress(OSError):
                    found.append((path, path.lstat()))
        return sorted(found, key=lambda item: item[1].st_mtime_ns)

    def _make_room(self, size: int) -> None:
        """Create the folder, and remove leftovers and what has not been used for longest."""
        if size > self.limit:
            raise OSError(f"{format_size(size)} are over the limit of {format_size(self.limit)}")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sweep()
        files = self._files()
        total = sum(status.st_size for _, status in files)
        for path, status in files:
            if total + size <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= status.st_size
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if free < size + _SPARE_BYTES:
            raise OSError(f"{format_size(size)} do not fit: {self.folder} has {format_size(free)} free")

    def _sweep(self) -> None:
        """Remove what writers left behind that were killed: their files are no longer locked."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            with (
                contextlib.suppress(OSError, IrregularFileError),
                open_regular(path, os.O_RDWR | os.O_NOFOLLOW) as file,
            ):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()

    def _finish(self, fd: int, written: Path, path: Path) -> None:
        try:
            os.fsync(fd)
            os.replace(written, path)
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:  # the disk gave up on it: the next start packs again, and says so if it fails again
            written.unlink(missing_ok=True)
        finally:
            os.close(fd)


def _removed(path: Path, why: str) -> DamagedError:
    """Remove a damaged file; the error that says so."""
    with contextlib.suppress(OSError):
        path.unlink()
    return DamagedError(f"packed weights {path.name}: {why}: packed again")


def _write_end(fd: int, size: int, sums: bytes, facts: dict[str, Any]) -> None:
    meta = json.dumps(facts).encode()
    tail = _TAIL.pack(_MAGIC, size, len(sums), len(meta), hashlib.sha256(sums + meta).digest())
    data, offset = sums + meta + tail, size
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _read_end(fd: int, key: str, packer: Packer) -> tuple[bytes, dict[str, Any]]:
    """Checksums and facts of an open file. Raises DamagedError unless it is the packer's, and `key`'s."""
    status = os.fstat(fd)
    if status.st_uid not in {os.geteuid(), 0} or status.st_mode & 0o022:
        raise DamagedError("others may write to it")
    end = status.st_size
    tail = os.pread(fd, _TAIL.size, max(0, end - _TAIL.size))
    if len(tail) != _TAIL.size:
        raise DamagedError("it is cut short")
    magic, weights, sums_bytes, meta_bytes, digest = _TAIL.unpack(tail)
    size, rest = packer.weight_bytes, sums_bytes + meta_bytes
    expected = (_MAGIC, size, 8 * packer.weight_chunks)
    if (
        (magic, weights, sums_bytes) != expected
        or size + rest + len(tail) != end
        or meta_bytes > _MAX_META_BYTES
    ):
        raise DamagedError("it is cut short, or not what its name says")
    data = os.pread(fd, rest, size)
    if hashlib.sha256(data).digest() != digest:
        raise DamagedError("its end was changed")
    facts: dict[str, Any] = json.loads(data[sums_bytes:])
    if facts.get("key") != key:
        raise DamagedError("it is another model's")
    return data[:sums_bytes], facts
