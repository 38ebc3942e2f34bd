"""Whether a server of KV blocks can be used: when it is tried again, and what is told of that."""

from __future__ import annotations

import threading
import time

from quire.util.standard_error import say
from quire.worker.kv_wire import OldConnectionError

PAUSES = (1.0, 30.0)  # seconds until a server that failed is asked again, and at most


class Outages:
    """Of one server. Any of the threads that use it says that it `failed`, one of them that it `answers`. `at`: where
    its blocks are, for what is told."""

    def __init__(self, at: str) -> None:
        self.up = self.was_up = False
        self.pause = PAUSES[0]
        self._at, self._lock = at, threading.Lock()
        self._retry, self._since = 0.0, 0.0  # when it is asked again, and since when it is up
        self._count = 0
        self._made: dict[int, int] = {}  # of how many outages each connection knows, by thread

    @property
    def pausing(self) -> bool:
        """Whether it is too early to ask it again."""
        return time.monotonic() < self._retry

    def connecting(self, thread: int) -> None:
        """A thread makes a new connection."""
        self._made[thread] = self._count

    def is_old(self, thread: int) -> bool:
        """Whether the connection of a thread is from before the last outage."""
        return self._made[thread] != self._count

    def answers(self) -> None:
        """All that it was asked for has come."""
        if not self.up:
            self.up, self._since = True, time.monotonic()
            if self.was_up:
                self._say("it answers again")
            self.was_up = True

    def failed(self, error: OSError, what: str = "") -> None:
        """A call failed; `what` says why in place of the error."""
        if isinstance(error, OldConnectionError):
            return
        now = time.monotonic()
        if self.up and now - self._since > PAUSES[1]:
            self.pause = PAUSES[0]
        with self._lock:  # of several threads on whose connections it fails, one tells it
            if now >= self._retry:  # else this outage has let the pause grow already
                self._retry, self.pause = now + self.pause, min(2 * self.pause, PAUSES[1])
            self._count += self.up
            tells = self.up or not self.was_up
            self.up, self.was_up = False, True
        if tells:
            late = isinstance(error, TimeoutError)
            what = "it does not answer in time" if late else what or error.strerror or str(error)
            self._say(f"{what}; KV blocks are computed until it can be used")

    def _say(self, what: str) -> None:
        # Whatever becomes of standard error, the thread goes on.
        say(f"quire: KV blocks {self._at}: {what}")
