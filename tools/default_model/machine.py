"""What the trainer asks of the machine: time, precision, memory, priority."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
from pathlib import Path

import torch


class Clock:
    """Computing time: on CPU the process's time over its threads, which other work beside it doesn't stretch."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._last = self._now()

    def _now(self) -> float:
        return time.perf_counter() if self._cuda else time.process_time() / torch.get_num_threads()

    def lap(self) -> float:
        """Seconds since the last call."""
        last, self._last = self._last, self._now()
        return self._last - last


def precision(device: str) -> str:
    """The faster one of float32 and bfloat16 for a linear layer of a step. CPUs without bfloat16 emulate it."""
    if device == "cuda":
        return "bfloat16"
    seconds = {}
    for kind in (torch.float32, torch.bfloat16):
        x, weight = torch.zeros(1024, 256, dtype=kind), torch.zeros(640, 256, dtype=kind)
        times = []
        for _ in range(4):
            clock = Clock(device)
            x @ weight.T
            times.append(clock.lap())
        seconds[kind] = min(times)
    return "bfloat16" if seconds[torch.bfloat16] < 0.8 * seconds[torch.float32] else "float32"


def autocast(device: str, kind: str) -> contextlib.AbstractContextManager[object]:
    """bfloat16 for the matrices of what runs inside, or nothing."""
    context: contextlib.AbstractContextManager[object] = torch.autocast(
        device, torch.bfloat16, enabled=kind == "bfloat16"
    )
    return context


def keep_memory() -> None:
    """Let glibc keep what it frees: a step frees and asks for the same large blocks again and again, and every page
    of a new one costs a fault.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_max, trim_threshold, arena_max = -4, -1, -8
        for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (arena_max, 1)):
            mallopt(option, value)


def stay_behind() -> None:
    """The lowest priority, for this process and those it starts."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)


def workers() -> int:
    """Processes that make text beside the training: on CPU none, it takes 2 % of a step there."""
    return max(1, min(15, (os.cpu_count() or 2) - 1)) if torch.cuda.is_available() else 0


def description() -> str:
    """The machine, for the model card."""
    if torch.cuda.is_available():
        return f"one {torch.cuda.get_device_name()}"
    names = [line for line in _cpuinfo().splitlines() if line.startswith("model name")]
    name = names[0].split(":")[1].strip() if names else platform.machine()
    wide = next((f for f in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f in _cpuinfo()), "")
    return f"{torch.get_num_threads()} threads of {name}" + (
        f" ({wide.upper().replace('_', ' ')})" if wide else ""
    )


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""
