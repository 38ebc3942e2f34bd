"""Control groups for a server under test, where this machine lets us make them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

_ROOT = Path("/sys/fs/cgroup")


class _Group:
    """Processes under limits of one controller."""

    def __init__(self, controller: str) -> None:
        self._old = (_ROOT / controller / "cgroup.procs").exists()  # version 1
        self._folder = (
            _ROOT / controller if self._old else _ROOT
        ) / f"quire-test-{os.getpid()}-{time.time_ns()}"
        self._folder.mkdir()

    def _write(self, name: str, value: int) -> None:
        (self._folder / name).write_text(str(value))

    def _read(self, name: str) -> str:
        return (self._folder / name).read_text()

    def join(self) -> None:
        """Put the calling process into the group, and so its children."""
        self._write("cgroup.procs", os.getpid())

    def close(self) -> None:
        """Remove the group; its processes have ended."""
        for _ in range(100):
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.05)


class ProcessGroup(_Group):
    """Processes that together may have `limit` processes and threads."""

    def __init__(self, limit: int) -> None:
        super().__init__("pids")
        self._write("pids.max", limit)


class MemoryGroup(_Group):
    """Processes that together may hold `limit` bytes; the kernel kills one of them when they need more."""

    def __init__(self, limit: int) -> None:
        super().__init__("memory")
        self._write("memory.limit_in_bytes" if self._old else "memory.max", limit)
        with contextlib.suppress(OSError):  # where there is no swap there is nothing to forbid
            self._write("memory.swappiness" if self._old else "memory.swap.max", 0)

    @property
    def peak(self) -> int:
        """The most that was ever charged, pages of files that can be dropped included."""
        return int(self._read("memory.max_usage_in_bytes" if self._old else "memory.peak"))

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed for memory."""
        lines = self._read("memory.oom_control" if self._old else "memory.events").splitlines()
        counts = dict(line.split() for line in lines)
        return int(counts["oom_kill"])


_G = TypeVar("_G", bound=_Group)


@contextlib.contextmanager
def limited(kind: Callable[[int], _G], limit: int) -> Iterator[_G | None]:
    """A group for the length of a context; None where this process may not make one."""
    try:
        group = kind(limit)
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        group.close()
