"""How fast the tiers beside memory are read: caches by all threads together, and a disk.

A pass over a cache takes microseconds, and starting the threads some more. So two sizes are read, and the rate is that
of the difference. The smallest cache is read too fast for that, and is left out.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping

from quire import _native

_PASSES, _ROUNDS = 30, 5
_PAGE = 4096
_DISK_BYTES, _DISK_PIECE = 2**28, 2**23


def cache_rates(isa: str, threads: int, caches: Mapping[str, int]) -> dict[str, float]:
    """Bytes a second that all threads read from each cache, by its name; `caches` has the bytes of each. Those of the
    last one are shared by the threads. A cache whose size does not show is left out.
    """
    core = _native.Executor(isa, threads)
    found, below = {}, 0
    names = sorted(caches, key=lambda name: caches[name])
    for name in names:
        most = caches[name] * 3 // 4 // (threads if name == names[-1] else 1)
        low, high = (int(size) // _PAGE * _PAGE * threads for size in (max(below, most / 2), most))
        if caches[name] >= 2**18 and high - low >= _PAGE * threads * 8:
            rate = _difference(core, low, high)
            if rate is not None:
                found[name] = rate
        below = caches[name]
    return found


def _difference(core: _native.Executor, low: int, high: int) -> float | None:
    rates = []
    for _ in range(_ROUNDS):
        probes = [(size, _native.BandwidthProbe(core, size)) for size in (low, high)]
        short, long = (min(size / probe.measure() for _ in range(_PASSES)) for size, probe in probes)
        if long > short:
            rates.append((high - low) / (long - short))
    return statistics.median(rates) if rates else None


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
