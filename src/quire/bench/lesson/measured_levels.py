"""The column of this machine in the lesson's simulation 5."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from quire import _native
from quire.bench.environment import environment
from quire.bench.memory_tiers import cache_rates
from quire.config import env
from quire.engine.build.kept_peaks import load_peaks
from quire.learn.this_machine import MeasuredLevels
from quire.util.platform import usable_cores

_LARGEST = 4 << 20  # bytes of a cache that is read here: a server's memory is planned, and this is in no plan


@cache
def _levels() -> Mapping[str, float]:
    """Caches are read now, once; memory takes an arena of hundreds of mebibytes, so it is as `quire bench limits` has
    left it."""
    threads = usable_cores()
    isa = _native.Executor(env.isa(), threads).isa
    caches = {name: size for name, size in environment().caches.items() if size <= _LARGEST}
    # cache_rates takes the largest for one that threads share.
    rates = cache_rates(isa, threads, caches) if caches else {}
    peaks = load_peaks(isa, threads)
    return rates | ({} if peaks is None else {"memory": peaks.bandwidth})


LEVELS = MeasuredLevels(_levels)
