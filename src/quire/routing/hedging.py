"""Requests that are sent to a second server when the first one is late: Dean and Barroso 2013, "The Tail at Scale".

A request is late when the first byte of its answer takes longer than that of nineteen in twenty has taken, beside what
was expected of each. No more than a share of all work is done twice. Nothing here has a clock.
"""

from __future__ import annotations

_LATE = 0.95  # of the answers begin earlier
_STEP = 0.05  # by which the running quantile moves
_FIRST, _LEAST = 4.0, 1.0  # of the expected time: the quantile at first, and at least
_LEARNED = 20  # answers before anything is sent twice
_BURST = 4.0  # requests of mean work that may be sent twice at once


class Hedging:
    """`share` of the work may be done twice; 0: none."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._quantile, self._seen = _FIRST, 0
        self._credit = self._mean = 0.0  # work that may be done twice; work of a request

    def came(self, work: float) -> None:
        """A request of so much work came."""
        self._mean += (0.05 if self._mean else 1.0) * (work - self._mean)
        self._credit = min(self._credit + self.share * work, _BURST * self._mean)

    def began(self, seconds: float, expected: float) -> None:
        """An answer began after so many seconds, where so many were expected."""
        self._seen += 1
        late = seconds > self._quantile * expected
        self._quantile = max(self._quantile * (1 + _STEP * (_LATE if late else _LATE - 1.0)), _LEAST)

    def delay(self, expected: float) -> float | None:
        """Seconds after which a request is late; None as long as that is unknown."""
        return self._quantile * expected if self.share and self._seen >= _LEARNED else None

    def take(self, work: float) -> bool:
        """Whether a late request of so much work may be sent to a second server; it is counted."""
        if work > self._credit:
            return False
        self._credit -= work
        return True
