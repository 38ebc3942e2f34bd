"""The capacity of a server: the throughput–latency curve, and its knee by bisection.

A load counts as served if the required share of its requests met every objective. Rates are doubled until one is not,
then the bracket between the highest served and the lowest unserved rate is halved (on a logarithmic scale) until it is
narrow enough. The knee is the measured load with the highest goodput; below it goodput follows the offered rate, above
it requests miss their objectives faster than they are added.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One measured load. `rate` is the offered requests per second; `figures` are the metrics of the run by name."""

    rate: float
    goodput: float
    share: float  # requests that met every objective, relative to all
    served: bool
    figures: dict[str, float | None]

    def row(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "goodput": self.goodput,
            "share": self.share,
            "served": self.served,
        } | self.figures


@dataclass(frozen=True, slots=True)
class Knee:
    """All measured loads in ascending order, and the result.

    `highest_served` and `lowest_unserved` bracket the load at which the objectives fail; None if no such load was
    measured.
    """

    points: list[Point]
    best: Point
    highest_served: float | None
    lowest_unserved: float | None

    def notes(self) -> list[str]:
        """Limits of the result."""
        notes = []
        if self.highest_served is None:
            notes.append(
                "no measured load met the objectives: even the lowest is too high, or the objectives are too strict"
            )
        if self.lowest_unserved is None:
            notes.append("every measured load was served: the knee is higher")
        if self.highest_served and self.lowest_unserved and self.lowest_unserved < self.highest_served:
            notes.append("a lower load failed although a higher one was served: the measurement is noisy")
        return notes


Measure = Callable[[float], Awaitable[Point]]


async def find_knee(
    measure: Measure,
    start: float,
    *,
    tolerance: float = 0.1,
    most: int = 12,
    limits: tuple[float, float] = (1e-3, 1e4),
) -> Knee:
    """Search from `start` requests per second until the relative width of the bracket is `tolerance` (0.1: ten percent)
    or `most` loads were measured. Raises ValueError naming a parameter out of range.
    """
    low_limit, high_limit = limits
    if not low_limit <= start <= high_limit:
        raise ValueError(f"start-rate: {start} is not within {low_limit:g} and {high_limit:g} requests/s")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance: {tolerance} is not between 0 and 1")
    if most < 2:
        raise ValueError(f"max-points: {most} is below 2")
    points = [await measure(start)]
    rate = start
    grow = points[0].served
    while len(points) < most and points[-1].served == grow:
        rate = rate * 2 if grow else rate / 2
        if not low_limit <= rate <= high_limit:
            break
        points.append(await measure(rate))
    while len(points) < most:
        low, high = _bracket(points)
        if low is None or high is None or high <= low * (1 + tolerance):
            break
        points.append(await measure(math.sqrt(low * high)))
    return knee_of(points)


async def curve(measure: Measure, rates: Sequence[float]) -> Knee:
    """Measure the given rates in ascending order."""
    return knee_of([await measure(rate) for rate in sorted(rates)])


def knee_of(points: Sequence[Point]) -> Knee:
    """Find the knee among measured loads. Raises ValueError without loads."""
    if not points:
        raise ValueError("rates: no rate was measured")
    low, high = _bracket(points)
    return Knee(sorted(points, key=lambda p: p.rate), max(points, key=lambda p: p.goodput), low, high)


def _bracket(points: Sequence[Point]) -> tuple[float | None, float | None]:
    """The highest served rate, and the lowest unserved one above it (or the lowest of all)."""
    low = max((p.rate for p in points if p.served), default=None)
    unserved = [p.rate for p in points if not p.served]
    above = [rate for rate in unserved if low is None or rate > low]
    return low, min(above, default=min(unserved, default=None))
