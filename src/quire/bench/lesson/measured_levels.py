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

_ARENA = 8 << 20  # bytes that are read here: as much as other simulations take for a moment


@cache
def _levels() -> Mapping[str, float]:
    """Caches are read now, once, for a few hundredths of a second; memory takes an arena of hundreds of mebibytes, so
    it is as `quire bench limits` has left it."""
    threads = usable_cores()
    isa = _native.Executor(env.isa(), threads).isa
    found = cache_rates(isa, threads, environment().caches, _ARENA)
    rates = {
        name if count == threads else f"{name}, {count} of {threads} threads": rate
        for name, (rate, count) in found.items()
    }
    peaks = load_peaks(isa, threads)
    return rates | ({} if peaks is None else {"memory": peaks.bandwidth})


LEVELS = MeasuredLevels(_levels)
