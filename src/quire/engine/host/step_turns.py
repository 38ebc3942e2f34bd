"""Engines of one machine take turns with their steps.

The threads of a step meet at barriers, where they spin. Two steps at once on the same cores stall each other: a
thread that has no core holds up all that spin for it. So one engine computes at a time.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time

# A turn is several steps where these are short: handing over wakes a process, which takes as long as a step of a small
# model. It lasts nearly as long as the turn before it, so that an engine of short steps beside one of long steps has
# about half the machine, and two engines of short steps come back to the shortest turn.
_LEAST_SECONDS, _MOST_SECONDS = 0.002, 0.05
_PART = 0.9
_LENGTH = struct.Struct("d")


class StepTurns:
    """The right to compute steps; a context manager around each of them. A turn goes on over the steps that follow
    until its time is over, or until `rest`. Engines that wait get it before one that has just had it.

    Two locks of the kernel on files: who waits holds `next`, who computes `turn`. One that has just given up `turn`
    finds `next` taken. The kernel frees the locks of a process that is killed.
    """

    def __init__(self, path: str) -> None:
        # opened here: locks belong to an open file, and are shared by those who inherit it
        self._turn, self._next = (
            os.open(f"{path}.{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for name in ("turn", "next")
        )
        self._held = False
        self._began = self._due = 0.0

    def __enter__(self) -> None:
        if self._held:
            return
        fcntl.flock(self._next, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)
        self._held, self._began = True, time.monotonic()
        told = os.pread(self._turn, _LENGTH.size, 0)
        before = _LENGTH.unpack(told)[0] if len(told) == _LENGTH.size else 0.0
        self._due = self._began + min(max(_LEAST_SECONDS, _PART * before), _MOST_SECONDS)

    def __exit__(self, *_: object) -> None:
        if time.monotonic() >= self._due:
            self.rest()

    def rest(self) -> None:
        """Give up the turn, if it is ours: there is nothing to compute."""
        if self._held:
            os.pwrite(self._turn, _LENGTH.pack(time.monotonic() - self._began), 0)
            self._held = False
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give up both locks, and close the files."""
        os.close(self._turn)
        os.close(self._next)
