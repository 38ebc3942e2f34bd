"""Decides whether the engine is alive, by the work it completes and not by the existence of its process."""

from __future__ import annotations

import enum
from collections import deque

_RECENT_STEPS = 256
_STEP_FACTOR = 20  # a step may take this many times the longest recent step
_BUSY_FACTOR = 30  # and this many times the limit while its process uses CPU time
_BUSY_SHARE = 0.02  # of one core: a container may be throttled, a stopped process uses none


class Verdict(enum.Enum):
    """The action to take now."""

    FINE = enum.auto()
    ASK = enum.auto()  # idle for a while: send a ping
    STALLED = enum.auto()


class Watchdog:
    """Times of the last sign of life. Pure: all times are arguments, in seconds of one monotonic clock.

    With work queued, a step must complete within `limit`: `timeout`, or 20 times the longest recent step. The first
    chunk of a long prompt on a large model may take longer than any earlier step, so a process that uses CPU time gets
    30 times the limit; a stopped or waiting process uses none. Without work, a ping must be answered within `timeout`.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self.timeout = timeout
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._sign = now
        self._asked: float | None = None
        self._checked = now
        self._cpu: float | None = None
        self._busy = False

    @property
    def limit(self) -> float:
        """Seconds that a step may take before it counts as a stall."""
        return max(self.timeout, _STEP_FACTOR * max(self._recent, default=0.0))

    @property
    def quiet_since(self) -> float:
        """Time of the last sign of life, or of the first work after the engine was idle."""
        return self._sign

    def stepped(self, seconds: float, now: float) -> None:
        """A step has completed."""
        self._recent.append(seconds)
        self._sign, self._asked = now, None

    def answered(self, now: float) -> None:
        """The engine has answered a ping or sent another message."""
        self._sign, self._asked = now, None

    def began(self, now: float) -> None:
        """An idle engine gets work: the wait for its step starts now."""
        self._sign = now

    def check(
        self, now: float, *, working: bool, cpu_seconds: float | None, overslept: float = 0.0
    ) -> Verdict:
        """Call regularly. `cpu_seconds` is the engine's CPU time so far; `overslept` is the delay of this call: time
        when the caller itself did not run does not count.
        """
        passed, self._checked = now - self._checked, now
        self._note_cpu(cpu_seconds, passed)
        if overslept > 0:
            self._sign += overslept
            if self._asked is not None:
                self._asked += overslept
        if working:
            self._asked = None
            allowed = self.limit * (_BUSY_FACTOR if self._busy else 1)
            return Verdict.STALLED if now - self._sign > allowed else Verdict.FINE
        if self._asked is not None:
            return Verdict.STALLED if now - self._asked > self.timeout else Verdict.FINE
        if now - self._sign > self.timeout / 2:
            self._asked = now
            return Verdict.ASK
        return Verdict.FINE

    def _note_cpu(self, cpu_seconds: float | None, passed: float) -> None:
        if cpu_seconds is None:
            self._busy = False
        elif self._cpu is not None and passed > 0:
            self._busy = cpu_seconds - self._cpu >= _BUSY_SHARE * passed
        self._cpu = cpu_seconds
