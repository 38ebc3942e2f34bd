from __future__ import annotations

import random

import numpy as np
import pytest

from quire.bench.statistics import (
    cluster_estimates,
    estimate,
    order_interval,
    percentile,
    wilson,
)


def test_percentiles_are_numpys() -> None:
    rng = random.Random(0)
    for count in (1, 2, 3, 10, 101):
        samples = sorted(rng.expovariate(1) for _ in range(count))
        for percent in (0, 50, 90, 95, 99, 99.9, 100):
            assert percentile(samples, percent) == pytest.approx(np.percentile(samples, percent))
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_places_of_the_interval_are_the_textbooks() -> None:
    # Conover, Practical Nonparametric Statistics: the median of 10 lies between the 2nd and the 9th of them.
    assert order_interval(10, 50.0) == (1, 8)
    assert order_interval(5, 50.0) == (None, None)  # five samples cannot show 95 %
    low, high = order_interval(100, 99.0)
    assert low is not None
    assert high is None
    exact, large = order_interval(4000, 90.0), order_interval(4001, 90.0)
    assert all(abs(a - b) <= 3 for a, b in zip(exact, large, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("percent", [50.0, 90.0])
def test_intervals_hold_the_truth_95_times_in_100(percent: float) -> None:
    rng = np.random.default_rng(1)
    truth = -np.log(1 - percent / 100)
    held = 0
    for _ in range(400):
        found = estimate(sorted(rng.exponential(size=120)), percent)
        held += found.low is not None and found.high is not None and found.low <= truth <= found.high
    assert 0.92 <= held / 400 <= 0.995


def test_gaps_of_one_request_are_no_independent_samples() -> None:
    """Twenty requests, each with a speed of its own: naive intervals are far too narrow, clustered ones hold."""
    rng = np.random.default_rng(2)
    naive = clustered = 0
    for trial in range(40):
        speeds = rng.exponential(size=20)
        clusters = [np.full(30, speed).tolist() for speed in speeds]
        found = cluster_estimates(clusters, [50.0], seed=trial)[0]
        flat = estimate(sorted(x for c in clusters for x in c), 50.0)
        truth = np.log(2)
        clustered += found.low is not None and found.high is not None and found.low <= truth <= found.high
        naive += flat.low is not None and flat.high is not None and flat.low <= truth <= flat.high
    assert clustered >= 34 > naive


def test_a_percentile_at_the_edge_is_open() -> None:
    found = cluster_estimates([[1.0, 2.0], [3.0, 4.0]], [99.9])[0]
    assert found.high is None
    assert cluster_estimates([[1.0, 2.0]], [50.0])[0].low is None


def test_shares() -> None:
    assert wilson(0, 0) == (None, None)
    low, high = wilson(90, 100)
    assert low == pytest.approx(0.8256, abs=1e-4)  # Newcombe (1998), method 3
    assert high == pytest.approx(0.9448, abs=1e-4)
