"""Find damage in stored bytes: NaN and infinity, holes of zeros, and changed digests.

A download that was resumed wrongly, or a sparse file that was never filled, has the right length and a valid header,
but a long run of zero bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from quire.loader.finite import FLOAT_FORMATS, first_nonfinite
from quire.loader.load import row_blocks
from quire.loader.quantized import QuantizedSource
from quire.loader.source import Array, Source
from quire.records import dataclass
from quire.util.files import open_regular

PAGE = 4096  # bytes; holes of a file are whole pages
ZERO_RUN = 16 * PAGE  # trained weights do not have this many zero bytes in a row
_READ_BYTES = 8 * 2**20
_GIT_BYTES = 64 * 2**20  # larger files are stored by SHA-256
_BLOCK_BYTES = 32 * 2**20

Advance = Callable[[int], None]  # gets the bytes read since the last call


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with a tensor. `fatal`: it cannot be used; else it is suspicious but may be intended."""

    tensor: str
    message: str
    fatal: bool
    hole: bool = False


def file_digests(path: Path, advance: Advance | None = None) -> dict[str, str]:
    """SHA-256 of a file and, for a small one, its git blob id (SHA-1 of a header and the content), in hex."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        while data := file.read(_READ_BYTES):
            sha256.update(data)
            if size <= _GIT_BYTES:
                git.update(data)
            if advance is not None:
                advance(len(data))
    return {"sha256": sha256.hexdigest()} | ({"git": git.hexdigest()} if size <= _GIT_BYTES else {})


def promised_digest(path: Path) -> tuple[str, str] | None:
    """Kind and digest under which the hub cache stores a file: the name of the blob that a snapshot links to."""
    if not path.is_symlink():
        return None
    blob = path.resolve()
    if blob.parent.name != "blobs":
        return None
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        return "sha256", blob.name
    return ("git", blob.name) if re.fullmatch(r"[0-9a-f]{40}", blob.name) else None


def scan_source(source: Source, advance: Advance | None = None) -> list[Finding]:
    """Find problems in the tensors of a source. Quantized ones are checked as numbers and, for holes, as stored."""
    found = [finding for name in source.names() for finding in scan_tensor(source, name, advance)]
    if isinstance(source, QuantizedSource):
        stored, names = source.stored_parts()
        found += [f for name in names for f in scan_tensor(stored, name) if f.hole]
    return found


def scan_tensor(source: Source, name: str, advance: Advance | None = None) -> list[Finding]:
    """Find problems in one tensor: its first NaN or infinity, and its longest hole of zeros."""
    info = source.info(name)
    if not info.shape or info.nbytes == 0:
        return []
    findings: list[Finding] = []
    zeros = _ZeroRuns()
    for start, stop in row_blocks(info, _BLOCK_BYTES):
        data = np.ascontiguousarray(source.read(name, start, stop))
        if info.dtype in FLOAT_FORMATS and not findings:
            bad = first_nonfinite(data, info.dtype)
            if bad is not None:
                index = [int(i) for i in np.unravel_index(bad, data.shape)]
                index[0] += start
                findings.append(Finding(name, f"element {index} is NaN or infinite", True))
        zeros.add(data)
        if advance is not None:
            advance(data.nbytes)
        del data
        source.release(name)
    if zeros.total == info.nbytes and len(info.shape) > 1:
        findings.append(Finding(name, "every byte is zero", False))
    elif zeros.longest >= ZERO_RUN:
        message = f"{zeros.longest} zero bytes in a row from byte {zeros.at}: possibly a hole in the file"
        findings.append(Finding(name, message, False, hole=True))
    return findings


class _ZeroRuns:
    """The longest run of zero pages in a sequence of blocks: `longest` bytes from byte `at` on."""

    def __init__(self) -> None:
        self.longest = self.at = self.total = 0
        self._run = self._read = 0

    def add(self, data: Array) -> None:
        flat = data.reshape(-1).view(np.uint8)
        whole = flat.size // PAGE
        used = flat[: whole * PAGE].view(np.uint64).reshape(whole, PAGE // 8).any(axis=1)
        tail = flat[whole * PAGE :]
        count = whole + (tail.size > 0)
        marks = [-1, *np.flatnonzero(used).tolist(), *([whole] if tail.any() else []), count]
        for gap in np.flatnonzero(np.diff(marks) > 1).tolist():
            start, end = (marks[gap] + 1) * PAGE, min(marks[gap + 1] * PAGE, flat.size)
            if start > 0:
                self._run = 0
            self._run, self.total = self._run + end - start, self.total + end - start
            if self._run > self.longest:
                self.longest, self.at = self._run, self._read + end - self._run
        if marks[-2] == count - 1:
            self._run = 0
        self._read += flat.size


def compare_digests(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """Describe files with another SHA-256 than before, new files and missing files."""
    changed = [f"{name}: the content has changed" for name in now if before.get(name, now[name]) != now[name]]
    gone = [f"{name}: no longer exists" for name in before if name not in now]
    return changed + gone + [f"{name}: did not exist before" for name in now if name not in before]
