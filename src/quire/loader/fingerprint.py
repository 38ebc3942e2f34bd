"""A digest that identifies checkpoint files, from metadata and samples or from every byte."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.types import CheckpointError
from quire.util.files import open_regular

HEAD_BYTES = 2**20  # covers the headers of nearly all checkpoints
SAMPLES, SAMPLE_BYTES = 256, 4096
_PIECE_BYTES = 32 * 2**20


def fingerprint(files: Sequence[Path], *, whole: bool = False, copies: bool = False) -> str:
    """Return a digest of checkpoint files, as hex.

    It covers the real path, size and modification time of each file, its first MiB and 256 evenly spaced pages. A file
    that was replaced or modified has another time; one that was restored with its old time (by an archive, a
    reproducible build) has another path or other bytes nearly everywhere. `whole` covers every byte and nothing else:
    it is certain and equal for all copies, but takes as long as reading and hashing the files on all cores. `copies`
    leaves out paths and times, so that it is quick and equal for copies on several hosts; a file of the same size that
    differs in few pages may have the same.

    Raises CheckpointError when a file cannot be read.
    """
    digest = hashlib.sha256(b"whole" if whole else b"sampled")
    try:
        for path in files:
            with open_regular(path) as file:
                fd = file.fileno()
                size = os.fstat(fd).st_size
                digest.update(f"|{size}".encode())
                if not whole and not copies:
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

    from concurrent.futures import ThreadPoolExecutor  # imports logging, and is rarely needed

    def piece(offset: int) -> bytes:
        return hashlib.sha256(os.pread(fd, _PIECE_BYTES, offset)).digest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        yield from pool.map(piece, range(0, size, _PIECE_BYTES))
