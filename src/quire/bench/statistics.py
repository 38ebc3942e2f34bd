"""Percentiles of raw samples and their intervals, without assuming a distribution.

Percentiles interpolate linearly between order statistics (type 7 of Hyndman and Fan, 1996; numpy's default).
Intervals cover 95 %: of independent samples by order statistics (David and Nagaraja, Order Statistics, 7.1); of
samples that come in clusters, as the token gaps of one request do, by resampling whole clusters (Davison and
Hinkley, Bootstrap Methods, 3.8); of shares by Wilson's formula (1927).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.records import dataclass

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
CONFIDENCE = 0.95
_Z = 1.959963984540054  # two-sided 95 % of the normal distribution
_RESAMPLES = 400
_EXACT_UP_TO = 4000  # samples for which the binomial distribution is summed exactly

Floats = NDArray[np.float64]
Interval = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval. A bound is None if there are too few samples."""

    value: float
    low: float | None
    high: float | None

    def times(self, factor: float) -> Estimate:
        """The same in another unit."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.value * factor, low, high)


def carried(count: int) -> tuple[float, ...]:
    """The percentiles that `count` samples support: the median, and those with a sample expected beyond them."""
    return tuple(p for p in PERCENTILES if p == 50.0 or count * (100.0 - p) >= 100.0 - 1e-6)


def percentile(samples: Sequence[float] | Floats, percent: float) -> float:
    """The `percent`-th percentile, 0 to 100, of ascending samples. Raises ValueError without samples."""
    if not len(samples):
        raise ValueError("samples: no samples, so there is no percentile")
    place = (len(samples) - 1) * percent / 100.0
    below = math.floor(place)
    low, high = float(samples[below]), float(samples[min(below + 1, len(samples) - 1)])
    if low == high:  # for infinities, and without rounding between equals
        return low
    return low + (high - low) * (place - below)


def order_interval(count: int, percent: float) -> tuple[int | None, int | None]:
    """Indices of the two of `count` independent ascending samples that enclose the percentile.

    None if no sample is far enough out for 95 %: the interval is open on that side.
    """
    share = percent / 100.0
    tail = (1.0 - CONFIDENCE) / 2
    if count > _EXACT_UP_TO:
        middle, reach = count * share, _Z * math.sqrt(count * share * (1 - share))
        low, high = math.floor(middle - reach), math.ceil(middle + reach)
        return (low if low >= 0 else None), (high if high < count else None)
    # k samples lie below the percentile with probability Binomial(count, share).
    below = np.cumsum(_binomial(count, share))
    first, last = int(np.searchsorted(below, tail, "right")), int(np.searchsorted(below, 1 - tail))
    return (first - 1 if first else None), (last if last < count else None)


def estimate(samples: Sequence[float], percent: float) -> Estimate:
    """A percentile of independent ascending samples, with the interval of order statistics."""
    low, high = (
        None if place is None else float(samples[place]) for place in order_interval(len(samples), percent)
    )
    return Estimate(percentile(samples, percent), low, high)


def cluster_estimates(
    clusters: Sequence[Sequence[float]], percents: Sequence[float], seed: int = 0
) -> list[Estimate]:
    """Percentiles of all samples of all clusters, with intervals from resampling whole clusters.

    Raises ValueError without samples. With one cluster there is nothing to resample: the intervals are open.
    """
    values, owner = _pooled(clusters)
    exact = [percentile(values, p) for p in percents]
    if len(clusters) < 2:
        return [Estimate(value, None, None) for value in exact]
    resamples = max(100, min(_RESAMPLES, 40_000_000 // max(1, len(values))))
    found = _weighted(values, owner, len(clusters), percents, np.random.default_rng(seed), resamples)
    ends = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    # If the percentile is the largest sample, the samples give no upper bound.
    return [
        Estimate(value, float(min(low, value)), float(max(high, value)) if high < values[-1] else None)
        for value, low, high in zip(exact, ends[0], ends[1], strict=True)
    ]


def cluster_draws(
    clusters: Sequence[Sequence[float]], percents: Sequence[float], rng: np.random.Generator, resamples: int
) -> Floats:
    """(resamples, len(percents)) percentiles of resampled clusters. Raises ValueError without samples."""
    values, owner = _pooled(clusters)
    return _weighted(values, owner, len(clusters), percents, rng, resamples)


def _pooled(clusters: Sequence[Sequence[float]]) -> tuple[Floats, NDArray[np.int64]]:
    """All samples in ascending order, and the cluster of each."""
    owner = np.repeat(np.arange(len(clusters), dtype=np.int64), [len(c) for c in clusters])
    values = np.concatenate([np.asarray(c, dtype=np.float64) for c in clusters])
    if not len(values):
        raise ValueError("samples: no samples, so there is no percentile")
    order = np.argsort(values, kind="stable")
    return values[order], owner[order]


def _weighted(
    values: Floats,
    owner: NDArray[np.int64],
    clusters: int,
    percents: Sequence[float],
    rng: np.random.Generator,
    resamples: int,
) -> Floats:
    """Percentiles with clusters weighted by their draws: one sort serves all resamples."""
    found = np.empty((resamples, len(percents)))
    shares = np.asarray(percents) / 100.0
    for i in range(resamples):
        times = np.bincount(rng.integers(0, clusters, clusters), minlength=clusters)
        weight = np.cumsum(times[owner])
        goals = np.ceil(shares * max(1, weight[-1])).astype(weight.dtype)  # else all weights become floats
        places = np.searchsorted(weight, goals, side="left")
        found[i] = values[np.minimum(places, len(values) - 1)]
    return found


def wilson(passed: int, count: int) -> Interval:
    """95 % interval of a share from `passed` of `count` trials; open without trials."""
    if not count:
        return None, None
    share, z2 = passed / count, _Z * _Z
    centre = share + z2 / (2 * count)
    reach = _Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    scale = 1 + z2 / count
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)


def _binomial(count: int, share: float) -> Floats:
    """The probability of each number of successes, for a share within 0 and 1."""
    k = np.arange(count + 1)
    log_factorial = np.cumsum(np.log(np.maximum(k, 1)))
    ways = log_factorial[-1] - log_factorial - log_factorial[::-1]
    found: Floats = np.exp(ways + k * math.log(share) + (count - k) * math.log1p(-share))
    return found
