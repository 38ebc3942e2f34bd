"""Service-level objectives and goodput: the rate of requests that meet every objective.

A failed request meets none. A request of one token has no TPOT and no ITL, so these objectives do not apply to it (vLLM
counts its TPOT as 0, with the same effect).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.statistics import percentile, wilson
from quire.bench.timeline import RequestMetrics
from quire.objectives import SLO
from quire.records import dataclass

# Starting points: the objectives of a product come from its users. Sources in docs/metrics.md.
PRESETS: dict[str, tuple[SLO, str]] = {
    "chat": (SLO(ttft=500, tpot=100), "a person reads along"),
    "code": (SLO(ttft=200, tpot=50, e2el=2000), "a completion must arrive before the next keystroke"),
    "voice": (SLO(ttft=150, tpot=20), "speech must start at once and never pause"),
    "batch": (SLO(ttft=2000, e2el=60_000), "no user waits, but jobs must end"),
    "agent": (SLO(ttft=1000, tpot=50, e2el=30_000), "each step waits for the previous one"),
}


def misses(slo: SLO, metrics: RequestMetrics | None) -> list[str]:
    """The objectives that a request missed, in order; all for a failure (None)."""
    bounds = slo.bounds
    if metrics is None:
        return list(bounds)
    itl = percentile(sorted(metrics.itl), 99.0) if "itl" in bounds and metrics.itl else None
    return slo.missed({"ttft": metrics.ttft, "tpot": metrics.tpot, "itl": itl, "e2el": metrics.e2e})


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many requests met every objective. Rates are requests per second; `low` and `high` bound `rate` (95 %)."""

    total: int
    passed: int
    seconds: float
    misses: dict[str, int]  # missed objective -> requests; a request may miss several
    failed: int
    low: float | None
    high: float | None

    @property
    def rate(self) -> float:
        return self.passed / self.seconds

    @property
    def share(self) -> float:
        return self.passed / self.total if self.total else 0.0


def goodput(metrics: Sequence[RequestMetrics | None], slo: SLO, seconds: float) -> Goodput:
    """Goodput of requests within `seconds`; None is a failed request.

    Raises ValueError when `seconds` is not positive.
    """
    if seconds <= 0:
        raise ValueError(f"seconds: {seconds} is not positive")
    missed = [misses(slo, one) for one in metrics]
    failed = sum(one is None for one in metrics)
    passed = sum(one is not None and not names for one, names in zip(metrics, missed, strict=True))
    counts = {name: sum(name in names for names in missed) for name in slo.bounds}
    rate = len(metrics) / seconds
    low, high = (None if end is None else end * rate for end in wilson(passed, len(metrics)))
    return Goodput(len(metrics), passed, seconds, counts, failed, low, high)


def compute_goodput(
    requests: Sequence[Mapping[str, Any]], slo_ttft_ms: float, slo_tpot_ms: float, seconds: float = 1.0
) -> dict[str, float | int]:
    """Goodput of plain dicts with "ttft_ms" and "tpot_ms" (None: one token) that arrived within `seconds`.

    Rates are per second; without `seconds` they equal the counts. Raises ValueError without requests.
    """
    if not requests:
        raise ValueError("requests: no requests, so there is no rate")
    slo = SLO(ttft=slo_ttft_ms, tpot=slo_tpot_ms)
    found = goodput([_plain(request) for request in requests], slo, seconds)
    return {
        "total_rps": _whole(found.total / seconds),
        "goodput_rps": _whole(found.rate),
        "goodput_rate": round(found.share, 3),
        "slo_violations": found.total - found.passed,
    }


def _plain(request: Mapping[str, Any]) -> RequestMetrics:
    ttft, tpot = request["ttft_ms"], request["tpot_ms"]
    tpot = None if tpot is None else tpot / 1e3
    return RequestMetrics(
        ttft=ttft / 1e3, tpot=tpot, e2e=ttft / 1e3, itl=[], icl=[], exact=True, send_lag=0.0
    )


def _whole(rate: float) -> float | int:
    return int(rate) if rate == int(rate) else rate
