"""Engines of one server share the processor cores out among those that compute.

The threads of a step meet at barriers, where they spin. If two engines with a thread for every core computed at once,
each thread without a core would hold up all that spin for it. So an engine whose neighbours compute, too, runs its
steps on its part of the cores: with one thread it has no barrier left, and the kernel's scheduler does the rest. The
number of threads changes no bit of an answer. An engine that is idle has no part.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.util.platform import usable_cores

_ROWS = 255
_SIZE = 8 * (_ROWS + 1)
# An engine counts as computing for so long after a step: its next request may be on its way.
GRACE_SECONDS = 0.005
# A step that lasts for so long may be one of a process that was killed.
_LOOK_SECONDS = 0.05


class CoreShares:
    """The part of one engine; `step` is a context manager around each of its steps. `path`: a file that they have
    in common, with a row for each engine that runs.

    A row is a float64: when the latest step ended, or, below 0, when the one that runs began (time.monotonic). It
    belongs to the process that locks the file `path`.N, until the kernel drops the lock of one that was killed. The
    first float is the number of rows in use.
    """

    def __init__(self, path: str, cores: int = 0) -> None:
        self._path, self._cores = path, cores or usable_cores()
        self._use: Callable[[int], None] = lambda _: None
        self._threads = self._used = 0
        self._locks: dict[int, int] = {}  # rows -> open lock files
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.ftruncate(file, _SIZE)
            self._map = mmap.mmap(file, _SIZE)
            self._rows = memoryview(self._map).cast("d")
            self._own = next((row for row in range(1, _ROWS + 1) if self._lock(row, fcntl.LOCK_EX)), 0)
            if not self._own:
                raise OSError(f"{path}: more than {_ROWS} engines share the cores")
            self._rows[self._own] = 0.0
            self._rows[0] = max(self._rows[0], self._own)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # the map keeps the file open
            os.close(file)

    def bind(self, threads: int, use: Callable[[int], None]) -> None:
        """Steps have at most so many threads; `use` sets how many."""
        self._threads = self._used = threads
        self._use = use

    @property
    def threads(self) -> int:
        """Threads of the latest step."""
        return self._used

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step, on this engine's part of the cores; or something else that takes cores, such as loading."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """A step begins."""
        rows, own, now = self._rows, self._own, time.monotonic()
        rows[own] = -now
        others = before = 0
        for row in range(1, int(rows[0]) + 1):
            at = rows[row]
            if at and row != own and (now - at < GRACE_SECONDS if at > 0 else self._computes(row, now + at)):
                others += 1
                before += row < own
        part, left = divmod(self._cores, others + 1)
        used = max(1, min(self._threads, part + (before < left)))
        if used != self._used:
            self._used = used
            self._use(used)

    def end(self) -> None:
        """The step has ended."""
        self._rows[self._own] = time.monotonic()

    def close(self) -> None:
        """Leave."""
        self._rows[self._own] = 0.0
        self._rows.release()
        self._map.close()
        for lock in self._locks.values():
            os.close(lock)

    def _computes(self, row: int, seconds: float) -> bool:
        """Whether a step that began so long ago still runs."""
        if seconds < _LOOK_SECONDS or not self._lock(row, fcntl.LOCK_SH):
            return True
        fcntl.flock(self._locks[row], fcntl.LOCK_UN)
        self._rows[row] = 0.0
        return False

    def _lock(self, row: int, kind: int) -> bool:
        if row not in self._locks:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._locks[row] = os.open(f"{self._path}.{row}", flags, 0o600)
        try:
            fcntl.flock(self._locks[row], kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
