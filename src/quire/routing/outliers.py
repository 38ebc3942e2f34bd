"""Servers that answer, but fail far more often than the others of their model, or begin far later: outlier ejection.

What counts is the comparison with the others: where all fail, or all are slow, none is an outlier. Lateness is the time
to the first byte over what the prompt, and those ahead of it, should have taken: longer prompts make no server slow.
And the one way in which any server rests: it gets no requests for a while, then one at a time until some have been
answered well, or it rests again for twice as long. Nothing here has a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

_PAUSES = (1.0, 30.0)  # seconds without requests: at first, and at most
_OUTLIER_PAUSES = (10.0, 300.0)
_PROBES, _OUTLIER_PROBES = 1, 3  # requests that are to be answered well one after the other
_WINDOW = 50.0  # answers that a record remembers, about
_SEEN = 30  # answers before a server is judged
_FAILING = 0.3  # of its answers, at least
_FAILING_TIMES, _FAILING_MORE = 4.0, 0.01  # as often as the others, and so much more
_SLOW_TIMES, _SLOW_SECONDS = 4.0, 0.25  # as late as the others, and so much later than expected


class ServerRecord:
    """What has become of the latest requests of a server: the share that `failing` ones have, the logarithm of how
    `late` answers begin over what was expected, and the seconds of `excess` over that."""

    def __init__(self) -> None:
        self.answers = self.begun = 0
        self.failing = self.late = self.excess = 0.0

    def ended(self, *, failed: bool) -> None:
        """A request has ended."""
        self.answers += 1
        self.failing += (float(failed) - self.failing) / min(self.answers, _WINDOW)

    def began(self, seconds: float, expected: float) -> None:
        """An answer began after so many seconds, where so many were expected."""
        self.begun += 1
        weight = 1.0 / min(self.begun, _WINDOW)
        self.late += (_lateness(seconds, expected) - self.late) * weight
        self.excess += (seconds - expected - self.excess) * weight


def _lateness(seconds: float, expected: float) -> float:
    return math.log(max(seconds, 1e-6) / max(expected, 1e-6))


def outliers(records: Mapping[str, ServerRecord], most: int) -> list[tuple[str, str]]:
    """Up to `most` servers that are far worse than the others, the worst first, and why: failing or slow. `records` are
    of servers that could answer for each other."""
    found: list[tuple[float, str, str]] = []
    for name, record in records.items():
        others = [each for other, each in records.items() if other != name]
        failing = [each.failing for each in others if each.answers >= _SEEN]
        if record.answers >= _SEEN and failing:
            usual = _FAILING_TIMES * median(failing) + _FAILING_MORE
            if record.failing >= max(_FAILING, usual):
                found.append((-record.failing / usual, name, "failing"))
                continue
        late = [each.late for each in others if each.begun >= _SEEN]
        if record.begun >= _SEEN and late and record.excess >= _SLOW_SECONDS:
            times = math.exp(record.late - median(late))
            if times >= _SLOW_TIMES:
                found.append((-times, name, "slow"))
    return [(name, why) for _, name, why in sorted(found)[: max(most, 0)]]


class Rest:
    """When a server may get requests. It rests after so many failures `in_a_row`, and as an outlier."""

    def __init__(self, in_a_row: int) -> None:
        self._in_a_row = in_a_row
        self.clear()

    def clear(self) -> None:
        """Nothing is known against it."""
        self._failures, self.until, self._pause = 0, 0.0, 0.0
        self.probes = 0  # requests that it is still to answer well, one after the other
        self.as_outlier = False

    def failed(self, now: float) -> float:
        """A request failed; the seconds for which it rests now, 0 for none: what was sent before says nothing new."""
        if now < self.until:
            return 0.0
        self._failures += 1
        if self.probes:
            return self._begin(now)
        return self.begin(now, as_outlier=False) if self._failures >= self._in_a_row else 0.0

    def begin(self, now: float, *, as_outlier: bool) -> float:
        """It rests from now on; returns for how many seconds."""
        self.as_outlier = as_outlier
        return self._begin(now)

    def _begin(self, now: float) -> float:
        shortest, longest = _OUTLIER_PAUSES if self.as_outlier else _PAUSES
        self._pause = min(2 * self._pause, longest) if self._pause else shortest
        self.until = now + self._pause
        self.probes = _OUTLIER_PROBES if self.as_outlier else _PROBES
        return self._pause

    def began(self, now: float, *, late: bool) -> float:
        """An answer began, `late` as those of an outlier; the seconds for which it rests again, 0 for none."""
        if not self.probes or now < self.until:
            return 0.0  # of a request from before
        if late and self.as_outlier:
            return self._begin(now)
        self.probes -= 1
        if not self.probes:
            self.clear()
        return 0.0

    def succeeded(self) -> None:
        """A request has ended well."""
        self._failures = 0
        if not (self.probes and self.as_outlier):
            self.clear()

    def is_over(self, now: float) -> bool:
        """Whether it may get requests."""
        return now >= self.until

    def takes(self, now: float, unanswered: float) -> bool:
        """Whether it may get one more, beside those that it has not begun to answer."""
        return now >= self.until and not (self.probes and unanswered)


def is_late(seconds: float, expected: float, others: Sequence[ServerRecord]) -> bool:
    """Whether one answer began as late as those of an outlier among others do."""
    known = [each.late for each in others if each.begun]
    times = math.exp(_lateness(seconds, expected) - (median(known) if known else 0.0))
    return times >= _SLOW_TIMES and seconds - expected >= _SLOW_SECONDS
