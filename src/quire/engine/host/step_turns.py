"""Engines of one machine take turns: one step at a time.

The threads of a step meet at barriers, where they spin. Two steps at once on the same cores stall each other: a
thread that has no core holds up all that spin for it. So a step of one engine waits for
that of another, and never for two.
"""

from __future__ import annotations

import fcntl
import os


class StepTurns:
    """The right to compute a step; a context manager. Engines that wait get it before one that has just had it.

    Two locks of the kernel on files: who waits holds `next`, who computes `turn`. One that has just given up `turn`
    finds `next` taken. The kernel frees the locks of a process that is killed. Taking and giving back both costs some
    microseconds.
    """

    def __init__(self, path: str) -> None:
        # opened here: locks belong to an open file, and are shared by those who inherit it
        self._turn, self._next = (
            os.open(f"{path}.{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for name in ("turn", "next")
        )

    def __enter__(self) -> None:
        fcntl.flock(self._next, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give up both locks, and close the files."""
        os.close(self._turn)
        os.close(self._next)
