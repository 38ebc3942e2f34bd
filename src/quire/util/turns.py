"""A fair lock for threads that take turns, and delayed interrupts."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Turns:
    """A lock that threads get in the order in which they requested it.

    The thread that releases a threading.Lock can take it again before waiting threads, so that one thread in a loop
    would starve the others.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take the lock; False if it is taken and `blocking` is False."""
        mine = threading.Lock()
        mine.acquire()
        with self._mutex:
            if not self._taken:
                self._taken = True
                return True
            if not blocking:
                return False
            self._waiting.append(mine)
        try:
            mine.acquire()
        except BaseException:  # Ctrl-C
            with self._mutex:
                given = mine not in self._waiting
                if not given:
                    self._waiting.remove(mine)
            if given:
                self.release()
            raise
        return True

    def release(self) -> None:
        """Pass the lock to the thread that has waited longest."""
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, so that its changes are complete."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # Python runs handlers in the main thread
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(*came[0])
