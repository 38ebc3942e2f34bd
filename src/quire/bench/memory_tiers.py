"""How fast the tiers beside memory are read: caches by threads together, and a disk.

A pass over a cache takes microseconds, and starting the threads some more. So threads make many passes at a time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping

from quire import _native

_SECONDS, _ROUNDS = 2e-3, 5  # of a measurement, and how many there are
_PAGE = 4096
_DISK_BYTES, _DISK_PIECE = 2**28, 2**23


def cache_rates(
    isa: str, threads: int, caches: Mapping[str, int], most: int = 2**62
) -> dict[str, tuple[float, int]]:
    """Bytes a second that are read from each cache, by its name, and by how many threads together; `caches` has the
    bytes of each. The last one is shared by the threads: fewer of them read it where caches above it would have what
    all of them read, in at most `most` bytes of memory. A cache for which that does not do is left out.
    """
    found, above = {}, 0
    names = sorted(caches, key=lambda name: caches[name])
    for name in names:
        shared = name == names[-1] and len(names) > 1
        room = caches[name] * 3 // 4 * (1 if shared else threads)
        count = min(threads, min(room, most) // max(2 * above, 4 * _PAGE))
        if count:
            share = min(room // (count if shared else threads), most // count) // _PAGE * _PAGE
            found[name] = _rate(_native.Executor(isa, count), share * count), count
        above = caches[name]
    return found


def _rate(core: _native.Executor, size: int) -> float:
    probe = _native.BandwidthProbe(core, size)
    passes = max(1, int(_SECONDS * probe.measure(16) / size))
    return max(probe.measure(passes) for _ in range(_ROUNDS))  # what else runs takes away and never adds


def disk_rate(folder: str) -> float:
    """Bytes a second that are read from a new file there, which is removed. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        piece = os.urandom(_DISK_PIECE)
        for _ in range(_DISK_BYTES // _DISK_PIECE):
            os.write(file.fileno(), piece)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        began = time.perf_counter()
        while os.read(file.fileno(), _DISK_PIECE):
            pass
        return _DISK_BYTES / (time.perf_counter() - began)
