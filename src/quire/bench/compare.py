"""Compare two result files: was it the same work, and what are the ratios?

Ratios are second over first. Their 95 % intervals come from resampling: of requests if the files contain them (so that
the gaps of one request stay together), else of the rounds behind a median. A figure without either has a ratio but no
interval.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.bench.goodput import misses
from quire.bench.results import Result
from quire.bench.server_bench import records_of
from quire.bench.statistics import CONFIDENCE, PERCENTILES, cluster_draws
from quire.bench.timeline import gap_clusters, latencies, request_metrics
from quire.objectives import parse_slo
from quire.records import dataclass
from quire.types import QuireError

RESAMPLES = 400
_FREE = frozenset(
    [
        "url",
        "backend",
        "model",
        "api",
        "counting",
        "arrival_variation",
        "words_per_token",
        "workload",
        "workload_facts",
    ]
)
Draws = NDArray[np.float64]


class CompareError(QuireError):
    """Two results cannot be compared; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class FigureChange:
    """One figure in both results. `ratio` is second over first; `verdict` "better", "worse" or "" (undecided)."""

    name: str
    unit: str
    first: float | None
    second: float | None
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str


def differences(first: Result, second: Result) -> list[str]:
    """List settings that differ although the same work needs them equal, one per line.

    Server and model may differ; lengths, texts, arrivals and objectives may not.
    """
    found = []
    if first.kind != second.kind:
        found.append(f"kind: {first.kind} and {second.kind}")
    names = [name for name in dict.fromkeys([*first.settings, *second.settings]) if name not in _FREE]
    if "workload_digest" not in first.settings:
        names += [name for name in ("workload", "model") if name in first.settings or name in second.settings]
    for name in names:
        a, b = first.settings.get(name), second.settings.get(name)
        if a != b:
            found.append(f"{name}: {a!r} and {b!r}")
    return found


def compare(first: Result, second: Result, *, force: bool = False) -> list[FigureChange]:
    """Compare every figure that both contain. Raises CompareError for different work, unless forced."""
    different = differences(first, second)
    if different and not force:
        raise CompareError(f"not the same work ({'; '.join(different)}); --force compares anyway")
    draws = [_draws(result) for result in (first, second)]
    changes = []
    for name, metric in first.metrics.items():
        other = second.metrics.get(name)
        if other is None or other.unit != metric.unit:
            continue
        low, high = _interval(draws[0].get(name), draws[1].get(name))
        a, b = metric.value, other.value
        ratio = b / a if a and b is not None else None
        verdict = _verdict(metric.better, low, high)
        changes.append(FigureChange(name, metric.unit, a, b, ratio, low, high, verdict))
    return changes


def _verdict(better: str, low: float | None, high: float | None) -> str:
    if better == "neither" or low is None or high is None or low <= 1.0 <= high:
        return ""
    return "better" if (low > 1.0) == (better == "higher") else "worse"


def _interval(first: Draws | None, second: Draws | None) -> tuple[float | None, float | None]:
    if first is None or second is None:
        return None, None
    count = min(len(first), len(second))
    fine = first[:count] > 0
    if fine.sum() < count // 2:
        return None, None
    low, high = np.quantile(
        second[:count][fine] / first[:count][fine], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    )
    return float(low), float(high)


def _draws(result: Result) -> dict[str, Draws]:
    """Figures of resampled data by name, in the metric's unit."""
    rng = np.random.default_rng(0)
    found: dict[str, Draws] = {}
    for name, metric in result.metrics.items():
        if len(metric.samples) >= 3:
            samples = np.asarray(metric.samples)
            found[name] = np.median(rng.choice(samples, (RESAMPLES, len(samples))), axis=1)
    if "requests" in result.tables:
        found |= _request_draws(result, rng)
    return found


def _request_draws(result: Result, rng: np.random.Generator) -> dict[str, Draws]:
    records = [record for record in records_of(result.tables["requests"]) if not record.warm_up]
    metrics = [None if record.failed else request_metrics(record) for record in records]
    good = [one for one in metrics if one is not None]
    found: dict[str, Draws] = {}
    for name, samples in latencies(good).items():
        if len(samples) >= 3 and name != "send_lag":
            factor = 1.0 if name == "stream_rate" else 1e3
            drawn = rng.choice(np.asarray(samples) * factor, (RESAMPLES, len(samples)))
            found[f"{name}_mean"] = drawn.mean(axis=1)
            for percent, row in zip(PERCENTILES, np.percentile(drawn, PERCENTILES, axis=1), strict=True):
                found[f"{name}_p{percent:g}"] = row
    for name, clusters in gap_clusters(good).items():
        if len(clusters) >= 3:
            drawn = cluster_draws(clusters, PERCENTILES, rng, RESAMPLES) * 1e3
            found |= {f"{name}_p{percent:g}": drawn[:, i] for i, percent in enumerate(PERCENTILES)}
    text = result.settings.get("goodput")
    if text and len(metrics) >= 3:
        slo = parse_slo([text])
        passed = np.asarray([float(one is not None and not misses(slo, one)) for one in metrics])
        share = rng.choice(passed, (RESAMPLES, len(passed))).mean(axis=1)
        found["goodput_share"] = share
        seconds = result.metrics["goodput"].value
        if seconds is not None:
            found["goodput"] = share * (seconds / max(passed.mean(), 1e-12))
    return found
