"""Compute the figures of a run from its requests. docs/metrics.md explains each with worked examples."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from quire.bench.goodput import Goodput, goodput
from quire.bench.results import Better, Metric
from quire.bench.statistics import (
    PERCENTILES,
    Estimate,
    Floats,
    carried,
    cluster_estimates,
    estimate,
    percentile,
)
from quire.bench.timeline import (
    RequestMetrics,
    RequestRecord,
    gap_clusters,
    gaps,
    latencies,
    request_metrics,
)
from quire.objectives import SLO
from quire.records import dataclass

TAIL_RATIO = 10.0  # p99 / p50 above this is a tail problem
_MOST_GAPS = (
    2_000_000  # between tokens, of which figures are computed: a million requests have two hundred millions
)

# Printed with every report; keys are the names of the figures.
DEFINITIONS = {
    "ttft": "scheduled send time → first chunk with text, including client lag, network, queue and prefill; "
    "streamed requests only",
    "e2el": "scheduled send time → last token (last chunk with text, or the finish reason when that came later)",
    "tpot": "(E2EL − TTFT) / (output tokens − 1), one value per request; undefined for one token",
    "itl": "every gap between neighbouring output tokens of a request, all requests together; k tokens in one "
    "chunk are one gap and k − 1 gaps of zero",
    "icl": "every gap between neighbouring chunks of a request, all requests together: the rhythm that a reader sees",
    "stream_rate": "1 / TPOT of each request: tokens per second of one stream after its first token",
    "send_lag": "scheduled send time → first byte passed to the socket: the client's own delay, part of every "
    "latency above",
    "seconds": "first scheduled send → end of the last response, including the drain",
    "request_rate": "successful requests / seconds",
    "input_token_rate": "prompt tokens of successful requests / seconds",
    "output_token_rate": "output tokens of successful requests / seconds",
    "total_token_rate": "prompt and output tokens of successful requests / seconds",
    "concurrency": "requests in flight, averaged over seconds (sum of their times / seconds)",
    "failure_rate": "failed requests / all requests",
    "goodput": "requests that met every objective / seconds; a failure meets none",
    "percentiles": "of raw samples, linear between neighbours, if a sample is expected beyond them (p99 needs 100); "
    "95 % intervals by order statistics, for token gaps by resampling whole requests",
    "with_failures": "the same percentiles, with each failed request counted as infinitely late",
}

# figure -> (unit, which way is better, factor from seconds)
_LATENCIES: dict[str, tuple[str, Better, float]] = {
    "ttft": ("ms", "lower", 1e3),
    "tpot": ("ms", "lower", 1e3),
    "itl": ("ms", "lower", 1e3),
    "icl": ("ms", "lower", 1e3),
    "e2el": ("ms", "lower", 1e3),
    "stream_rate": ("tokens/s", "higher", 1.0),
    "send_lag": ("ms", "lower", 1e3),
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """One latency of a run, in `unit`. `points` are the percentiles that the number of samples supports;
    `with_failures` is in DEFINITIONS.
    """

    name: str
    unit: str
    better: Better
    count: int
    mean: float
    std: float
    low: float
    high: float
    points: dict[float, Estimate]
    with_failures: dict[float, float] = field(default_factory=dict)

    def at(self, percent: float) -> float | None:
        """A percentile; None if there are too few samples."""
        point = self.points.get(percent)
        return None if point is None else point.value

    @property
    def tail(self) -> float | None:
        """p99 / p50; infinite if only the median is zero, None without a p99."""
        middle, far = self.points[50.0].value, self.at(99.0)
        if far is None:
            return None
        return far / middle if middle else math.inf if far else 1.0

    def row(self) -> dict[str, Any]:
        """A row of a table: p50 … p99.9 with the bounds of their intervals."""
        row: dict[str, Any] = {
            "name": self.name, "unit": self.unit, "count": self.count, "mean": self.mean, "std": self.std,
            "min": self.low, "max": self.high,
        }  # fmt: skip
        for percent in PERCENTILES:
            name, point = f"p{percent:g}", self.points.get(percent)
            row |= {
                name: self.at(percent),
                f"{name}_low": point and point.low,
                f"{name}_high": point and point.high,
            }
        for percent, value in self.with_failures.items():
            row[f"p{percent:g}_with_failures"] = value if math.isfinite(value) else None
        return row


@dataclass(frozen=True, slots=True)
class Summary:
    """Every figure of a run. Rates are per second of `seconds`."""

    seconds: float
    total: int
    completed: int
    failures: Counter[str]
    input_tokens: int
    output_tokens: int
    offered_rate: float
    concurrency: float
    distributions: dict[str, Distribution]
    goodput: Goodput | None
    slo: SLO | None
    notes: list[str]

    @property
    def failed(self) -> int:
        return self.total - self.completed

    def warnings(self) -> list[str]:
        """Findings that a reader must not overlook."""
        found = []
        if self.failed:
            kinds = ", ".join(f"{count} × {kind}" for kind, count in self.failures.most_common(4))
            found.append(f"{self.failed} of {self.total} requests failed: {kinds}")
        for name in ("ttft", "tpot", "itl", "e2el"):
            one = self.distributions.get(name)
            tail = one.tail if one is not None and one.points[50.0].value > 0 else None
            if tail is not None and tail > TAIL_RATIO:
                found.append(
                    f"tail: p99 of {name.upper()} is {tail:.1f} × its median (more than {TAIL_RATIO:g} ×)"
                )
        return found

    def metrics(self) -> dict[str, Metric]:
        """The figures used to compare two results."""
        rates = {
            "request_rate": self.completed / self.seconds,
            "input_token_rate": self.input_tokens / self.seconds,
            "output_token_rate": self.output_tokens / self.seconds,
            "total_token_rate": (self.input_tokens + self.output_tokens) / self.seconds,
        }
        found = {
            name: Metric(value, "requests/s" if name == "request_rate" else "tokens/s", "higher")
            for name, value in rates.items()
        }
        found["failure_rate"] = Metric(self.failed / self.total if self.total else None, "share", "lower")
        found["concurrency"] = Metric(self.concurrency, "requests")
        found["offered_rate"] = Metric(self.offered_rate, "requests/s")
        if self.goodput is not None:
            found["goodput"] = Metric(self.goodput.rate, "requests/s", "higher")
            found["goodput_share"] = Metric(self.goodput.share, "share", "higher")
        for name, one in self.distributions.items():
            found[f"{name}_mean"] = Metric(one.mean, one.unit, one.better)
            for percent in PERCENTILES:
                found[f"{name}_p{percent:g}"] = Metric(one.at(percent), one.unit, one.better)
        return found


def summarize(records: Iterable[RequestRecord], slo: SLO | None = None) -> Summary:
    """Compute the figures of all requests except warm-up. Raises ValueError if there are none."""
    counted = [record for record in records if not record.warm_up]
    if not counted:
        raise ValueError("requests: no request was measured")
    kept = _drawn(counted) if slo is None or slo.itl is None else None
    metrics = [
        None if record.failed else request_metrics(record, with_gaps=kept is None or place in kept)
        for place, record in enumerate(counted)
    ]
    good = [one for one in metrics if one is not None]
    start, end = min(r.scheduled for r in counted), max(r.closed for r in counted)
    seconds = max(end - start, 1e-9)
    spread = max(r.scheduled for r in counted) - start
    done = [record for record in counted if not record.failed]
    return Summary(
        seconds=seconds,
        total=len(counted),
        completed=len(good),
        failures=Counter(record.error for record in counted if record.failed),
        input_tokens=sum(record.input_tokens or 0 for record in done),
        output_tokens=sum(record.output_tokens or 0 for record in done),
        offered_rate=(len(counted) - 1) / spread if spread > 0 else math.inf if len(counted) > 1 else 0.0,
        concurrency=sum(record.closed - record.scheduled for record in counted) / seconds,
        distributions=_distributions(good, len(counted) - len(good)),
        goodput=goodput(metrics, slo, seconds) if slo is not None else None,
        slo=slo,
        notes=_notes(done, good)
        + ([] if kept is None else [f"ITL and ICL are those of {len(kept)} requests, drawn by chance"]),
    )


def _drawn(records: Sequence[RequestRecord]) -> set[int] | None:
    """Which requests' gaps count, if all would be too many; None if all do."""
    chunks = sum([len(record.times) for record in records])
    if chunks <= _MOST_GAPS:
        return None
    return set(random.Random(0).sample(range(len(records)), max(1, len(records) * _MOST_GAPS // chunks)))


def _distributions(good: Sequence[RequestMetrics], failed: int) -> dict[str, Distribution]:
    per_request, clusters = latencies(good), gap_clusters(good)
    if clusters["itl"] == clusters["icl"]:
        del clusters["icl"]  # one token per chunk: the same figures twice
    found = {}
    for name in _LATENCIES:
        if per_request.get(name):
            samples = sorted(per_request[name])
            points = {percent: estimate(samples, percent) for percent in carried(len(samples))}
            late = {}
            if failed and name in {"ttft", "e2el"}:
                ends = [*samples, *[math.inf] * failed]
                late = {percent: percentile(ends, percent) * 1e3 for percent in carried(len(ends))}
            found[name] = _distribution(name, samples, points, late)
        elif clusters.get(name):
            pooled = np.sort(np.concatenate(clusters[name]))
            percents = carried(len(pooled))
            estimates = cluster_estimates(clusters[name], percents)
            found[name] = _distribution(name, pooled, dict(zip(percents, estimates, strict=True)), {})
    return found


def _distribution(
    name: str, samples: Sequence[float] | Floats, points: dict[float, Estimate], late: dict[float, float]
) -> Distribution:
    unit, better, factor = _LATENCIES[name]
    scaled = np.asarray(samples, dtype=np.float64) * factor
    return Distribution(
        name=name,
        unit=unit,
        better=better,
        count=len(samples),
        mean=float(scaled.mean()),
        std=float(scaled.std(ddof=1)) if len(scaled) > 1 else 0.0,
        low=float(scaled[0]),
        high=float(scaled[-1]),
        points={percent: point.times(factor) for percent, point in points.items()},
        with_failures=late,
    )


def _notes(done: Sequence[RequestRecord], good: Sequence[RequestMetrics]) -> list[str]:
    notes = []
    for what in ("input", "output"):
        sources = Counter(getattr(record, f"{what}_source") for record in done)
        if set(sources) - {"server"}:
            counters = ", ".join(
                f"{_SOURCES[source]} ({count} requests)" for source, count in sources.most_common()
            )
            notes.append(f"{what} tokens counted by {counters}")
    bundled = sum(not one.exact for one in good)
    if bundled:
        notes.append(
            f"ITL of {bundled} requests is measured between chunks: the server did not report the tokens of each"
        )
    chunks = sum(len(record.times) for record in done)
    tokens = sum(record.output_tokens or 0 for record in done)
    if chunks and tokens > 1.05 * chunks:
        notes.append(f"{tokens / chunks:.2f} tokens per chunk: see ICL for the gaps that a reader sees")
    if any(not record.streamed for record in done):
        notes.append("not streamed, so there is no TTFT, TPOT or ITL")
    short = sum(
        1 for r in done if r.asked_tokens and r.output_tokens is not None and r.output_tokens < r.asked_tokens
    )
    if short:
        notes.append(f"{short} requests ended before the requested output length")
    return notes


_SOURCES = {
    "server": "the server",
    "tokenizer": "a local tokenizer",
    "chunks": "chunks, one token each: an estimate",
    "unknown": "nothing",
}


def compute_metrics(ttft_ms: float, token_timestamps_ms: Sequence[float]) -> dict[str, float | None]:
    """Return all figures of one request, rounded for printing. Times in milliseconds from its scheduled send.

    `token_timestamps_ms[0]` is the time of the first token and must equal `ttft_ms`. A single token has no TPOT, no
    rate and no gaps: None, not 0. Raises ValueError for no tokens, times out of order or another first time.
    """
    times = [float(at) for at in token_timestamps_ms]
    if not times:
        raise ValueError("token_timestamps_ms: no tokens, so there is no latency")
    if not math.isclose(times[0], ttft_ms, rel_tol=1e-9, abs_tol=1e-6):
        raise ValueError(f"token_timestamps_ms: the first is {times[0]:g}, but ttft_ms is {ttft_ms:g}")
    itls = gaps(times)
    if any(gap < 0 for gap in itls):
        raise ValueError("token_timestamps_ms: not in ascending order")
    e2el = times[-1]
    found: dict[str, float | None] = {"ttft_ms": ttft_ms, "e2el_ms": round(e2el, 2)}
    if not itls:
        names = ("tpot_ms", "tokens_per_sec", "mean_itl_ms", "p50_itl_ms", "p99_itl_ms")
        return found | dict.fromkeys(names)
    tpot, ordered = (e2el - ttft_ms) / len(itls), sorted(itls)
    return found | {
        "tpot_ms": round(tpot, 2),
        "tokens_per_sec": round(1000 / tpot, 1) if tpot else None,
        "mean_itl_ms": round(statistics.fmean(itls), 2),
        "p50_itl_ms": round(percentile(ordered, 50.0), 2),
        "p99_itl_ms": round(percentile(ordered, 99.0), 2),
    }


def mean_itl(requests: Iterable[tuple[int, float]]) -> float:
    """Return the mean of all gaps of requests given as (tokens, mean gap). n tokens have n − 1 gaps.

    Raises ValueError when no request has a gap.
    """
    pairs = [(tokens - 1, gap) for tokens, gap in requests if tokens > 1]
    if not pairs:
        raise ValueError("requests: no request has two tokens, so there is no gap")
    return sum(count * gap for count, gap in pairs) / sum(count for count, _ in pairs)
