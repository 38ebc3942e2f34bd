"""A lock for threads that take turns, and interrupts that wait for the end of one."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Turns:
    """A lock that is handed over in the order in which threads asked for it.

    threading.Lock lets the thread that has just released it take it again before those that wait, so that one
    thread in a loop would keep out all others.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take the lock; False when it is taken and `blocking` is False."""
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
        """Hand the lock to the thread that has waited longest."""
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
    """Ctrl-C inside the block takes effect at its end: what the block changes is changed whole."""
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
