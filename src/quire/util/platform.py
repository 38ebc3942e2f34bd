"""Limits of this machine and container: cores, memory, resident size; and how long this process lives."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG = 1
_CPUCLOCK_SCHED = 2


def usable_cores() -> int:
    """Cores this process may run on: CPU affinity, reduced by a cgroup CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _cgroup_quota() or cores))


def available_memory() -> int:
    """Bytes that this process can still allocate: the kernel's "available", or less under a cgroup limit."""
    available = meminfo("MemAvailable")
    limit = _read_number(_CGROUP / "memory.max")
    used = _read_number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def memory_share(share: float) -> int:
    """Bytes of a share of the available memory, vLLM's gpu_memory_utilization. Raises ValueError."""
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization: {share:g} is not in (0, 1]")
    return int(share * available_memory())


def total_memory() -> int:
    """Bytes of memory that this machine has, or fewer under a cgroup limit."""
    return min(meminfo("MemTotal"), _read_number(_CGROUP / "memory.max") or sys.maxsize)


def resident_bytes(pid: int | str = "self") -> int:
    """Resident set size of a process in bytes; 0 of one that is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        if pid != "self":
            return 0
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def resident_exactly(pid: int | str = "self") -> int:
    """Resident set size of a process in bytes, counted page by page; `resident_bytes` lags behind, because the kernel
    collects it from all processors. Takes some milliseconds per GiB.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
    except (OSError, StopIteration):
        return resident_bytes(pid)


def resident_of_tree(pid: int) -> int:
    """Resident set size in bytes of a process and of all that it and those have started: 0 of one that is gone; a page
    that several share counts in each. For Linux.
    """
    found = resident_exactly(pid)
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
                found += sum(resident_of_tree(int(each)) for each in children)
    return found


def end_with_parent(parent: int) -> None:
    """End this process with its parent, whatever it is doing then: more precisely, with the thread that started it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        sys.exit(1)


def started_by(pid: int) -> list[int]:
    """The processes that the first thread of a process has started and that are still there. For Linux."""
    try:
        return [int(found) for found in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def processor_seconds(pid: int) -> float:
    """Processor time that a process has taken. Raises OSError when there is none. For Linux."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)  # as clock_getcpuclockid(3) numbers it


def meminfo(key: str) -> int:
    """Bytes of a line of /proc/meminfo; those of all memory where there is none."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_quota() -> int | None:
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        return None
    return None if quota == "max" else math.ceil(int(quota) / int(period))


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max", or no cgroup v2
        return None
