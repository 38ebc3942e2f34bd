"""Which weights these are: a digest of checkpoint files, by what tells them apart at once or by every byte."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.types import CheckpointError
from quire.util.files import open_regular

HEAD_BYTES = 2**20  # the headers of nearly all checkpoints
SAMPLES, SAMPLE_BYTES = 256, 4096
_PIECE_BYTES = 32 * 2**20


def fingerprint(files: Sequence[Path], *, whole: bool = False) -> str:
    """A digest of checkpoint files, as hex.

    Takes each file's real path, size and time of change, its first MiB and 256 pages spread evenly over it. A file
    that was replaced or written to has another time; one that was put there with its old time (by an archive, a
    reproducible build) has another path or other bytes nearly everywhere. `whole` takes every byte and nothing
    else: certain, true of any copy of the files, and as slow as reading and hashing them on all cores.

    Raises CheckpointError when a file cannot be read.
    """
    digest = hashlib.sha256(b"whole" if whole else b"sampled")
    try:
        for path in files:
            with open_regular(path) as file:
                fd = file.fileno()
                size = os.fstat(fd).st_size
                digest.update(f"|{size}".encode())
                if not whole:
                    digest.update(f"|{os.path.realpath(path)}|{os.fstat(fd).st_mtime_ns}|".encode())
                for piece in _every_byte(fd, size) if whole else _samples(fd, size):
                    digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"{error.filename or files}: {error.strerror or error}") from None
    return digest.hexdigest()


def _samples(fd: int, size: int) -> Iterator[bytes]:
    yield os.pread(fd, HEAD_BYTES, 0)
    if size > HEAD_BYTES:
        step = (size - HEAD_BYTES) / SAMPLES
        for i in range(1, SAMPLES + 1):
            yield os.pread(fd, SAMPLE_BYTES, int(HEAD_BYTES + i * step) - SAMPLE_BYTES)


def _every_byte(fd: int, size: int) -> Iterator[bytes]:
    """SHA-256 of each piece of a file, in order, computed on all cores."""

    from concurrent.futures import ThreadPoolExecutor  # imports logging, and few starts come here

    def piece(offset: int) -> bytes:
        return hashlib.sha256(os.pread(fd, _PIECE_BYTES, offset)).digest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        yield from pool.map(piece, range(0, size, _PIECE_BYTES))
