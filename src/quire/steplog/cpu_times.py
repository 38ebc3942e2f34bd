"""What the processors of the machine did lately, as far as the operating system tells."""

from __future__ import annotations

import time
from typing import NamedTuple

_SECONDS = 0.1  # between two readings: each costs a system call or two
_TICK = 10_000  # microseconds: what the kernel counts in


class CpuTimes(NamedTuple):
    """Microseconds of CPU time: given to other guests by a hypervisor, had by other processes, had by this one."""

    stolen: int = 0
    others: int = 0
    own: int = 0


_NONE = CpuTimes()


class CpuClock:
    """CPU time of the machine since the last reading."""

    def __init__(self) -> None:
        self.due, self._last = 0, _read()

    def since(self, now: int) -> CpuTimes:
        """CPU times since the last reading, at `now` in nanoseconds; 0 before the next reading is due, and where the
        system does not tell."""
        if now < self.due:
            return _NONE
        self.due = now + int(_SECONDS * 1e9)
        before, self._last = self._last, _read()
        stolen, busy, own = (new - old for new, old in zip(self._last, before, strict=True))
        return CpuTimes(max(0, stolen), max(0, busy - own), max(0, own))


def _read() -> tuple[int, int, int]:
    """Stolen, of all processes, of this one. The first two are counted in ticks, and 0 where they are not known."""
    own = time.process_time_ns() // 1000
    try:
        with open("/proc/stat", "rb") as file:
            user, nice, system, _, _, irq, softirq, stolen = map(int, file.readline(512).split()[1:9])
    except (OSError, ValueError):
        return 0, 0, own
    return stolen * _TICK, (user + nice + system + irq + softirq) * _TICK, own
