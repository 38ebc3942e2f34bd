"""A histogram whose observations cost one bisection each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts of values by upper bound, as Prometheus defines them: a value equal to a bound is within it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = sorted(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self, bounds: Sequence[float]) -> list[tuple[str, float]]:
        """Cumulative counts at some of the bounds, ending with +Inf, as the exposition needs them."""
        cumulative = dict(zip(self.bounds, accumulate(self.counts), strict=False))
        found: list[tuple[str, float]] = [(str(float(bound)), cumulative[bound]) for bound in bounds]
        return [*found, ("+Inf", sum(self.counts))]
