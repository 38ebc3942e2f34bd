"""The time between the tokens of requests, judged by the rule of `quire bench` in a few numbers a request."""

from __future__ import annotations

import math

_SHARE = 0.99  # of the gaps: what an ITL bounds is their 99th percentile
_EXACT = 1e-12  # seconds: as in SLO.missed, no miss


class TokenGaps:
    """The gaps between the tokens of a request, as far as a bound in seconds has to know them: how many there are, how
    many are longer, and the two that are next to the bound. Tokens that come together are gaps of 0."""

    __slots__ = ("_above", "_below", "_bound", "_count", "_last", "_longer")

    def __init__(self, bound: float) -> None:
        self._bound = bound + _EXACT
        self._count = self._longer = 0
        self._below, self._above = 0.0, math.inf  # the longest within the bound, and the shortest beyond
        self._last: dict[int, float] = {}  # by sample: when its latest token came

    def came(self, sample: int, tokens: int, now: float) -> None:
        """So many tokens of a sample have come, at least one."""
        before = self._last.get(sample)
        self._last[sample] = now
        self._count += tokens - (before is None)
        if before is None:
            return
        gap = now - before
        if gap > self._bound:
            self._longer += 1
            self._above = min(self._above, gap)
        else:
            self._below = max(self._below, gap)

    def percentile(self) -> float | None:
        """The 99th percentile where it is next to the bound, otherwise a gap on its side of the bound; None without
        gaps."""
        if not self._count:
            return None
        place = _SHARE * (self._count - 1)
        low, first = (
            math.floor(place),
            self._count - self._longer,
        )  # the first that is longer, in ascending order
        if low >= first:
            return self._above
        if low + 1 < first:
            return self._below
        part = place - low
        return self._below + (self._above - self._below) * part if part else self._below
