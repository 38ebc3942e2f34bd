"""Service-level objectives and goodput: the rate of requests that meet every objective.

A failed request meets none. A request of one token has no TPOT and no ITL, so these objectives do not apply to it (vLLM
counts its TPOT as 0, with the same effect).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.statistics import percentile, wilson
from quire.bench.timeline import RequestMetrics
from quire.records import dataclass

# name of the objective -> the bounded figure of a request
OBJECTIVES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first, the request's mean",
    "itl": "inter-token latency, the 99th percentile of the request's gaps",
    "e2el": "end-to-end latency",
}


@dataclass(frozen=True, slots=True)
class SLO:
    """Upper bounds in milliseconds; None is unbounded. A value equal to its bound meets it.

    `share` is the share of requests that must meet them for a load to count as served (used by `sweep`).
    """

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2el: float | None = None
    share: float = 0.9

    def __post_init__(self) -> None:
        for name in OBJECTIVES:
            bound = getattr(self, name)
            if bound is not None and not 0 < bound < float("inf"):
                raise ValueError(f"goodput: {name}: {bound!r} is not a positive number of milliseconds")
        if not 0 < self.share <= 1:
            raise ValueError(f"slo-share: {self.share} is not above 0 and at most 1")

    @property
    def bounds(self) -> dict[str, float]:
        """The objectives that are set, in milliseconds."""
        return {name: getattr(self, name) for name in OBJECTIVES if getattr(self, name) is not None}

    def misses(self, metrics: RequestMetrics | None) -> list[str]:
        """List the objectives that a request missed, in order; all for a failure (None)."""
        bounds = self.bounds
        if metrics is None:
            return list(bounds)
        itl = percentile(sorted(metrics.itl), 99.0) if "itl" in bounds and metrics.itl else None
        seen = {"ttft": metrics.ttft, "tpot": metrics.tpot, "itl": itl, "e2el": metrics.e2e}
        # the time is a sum of floats: a picosecond is no miss
        return [
            name
            for name, bound in bounds.items()
            if (at := seen[name]) is not None and at * 1e3 > bound + 1e-9
        ]

    def __str__(self) -> str:
        return " ".join(f"{name}:{bound:g}" for name, bound in self.bounds.items())


# Starting points: the objectives of a product come from its users. Sources in docs/metrics.md.
PRESETS: dict[str, tuple[SLO, str]] = {
    "chat": (SLO(ttft=500, tpot=100), "a person reads along"),
    "code": (SLO(ttft=200, tpot=50, e2el=2000), "a completion must arrive before the next keystroke"),
    "voice": (SLO(ttft=150, tpot=20), "speech must start at once and never pause"),
    "batch": (SLO(ttft=2000, e2el=60_000), "no user waits, but jobs must end"),
    "agent": (SLO(ttft=1000, tpot=50, e2el=30_000), "each step waits for the previous one"),
}


def parse_slo(words: Sequence[str], share: float = 0.9) -> SLO:
    """Parse an SLO from words like "ttft:500" "tpot:50" (milliseconds), the syntax of vLLM's bench.

    Raises ValueError naming the word.
    """
    bounds: dict[str, float] = {}
    for word in (part for text in words for part in text.replace(",", " ").split()):
        name, colon, value = word.replace("=", ":").partition(":")
        if not colon or name not in OBJECTIVES:
            raise ValueError(
                f"goodput: {word!r} does not have the form ttft:500; known objectives: {', '.join(OBJECTIVES)}"
            )
        if name in bounds:
            raise ValueError(f"goodput: {name} is given twice")
        try:
            bounds[name] = float(value.removesuffix("ms"))
        except ValueError:
            raise ValueError(f"goodput: {word!r}: {value!r} is not a number of milliseconds") from None
    if not bounds:
        raise ValueError("goodput: no objective given")
    return SLO(**bounds, share=share)


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
    missed = [slo.misses(one) for one in metrics]
    failed = sum(one is None for one in metrics)
    passed = sum(one is not None and not names for one, names in zip(metrics, missed, strict=True))
    misses = {name: sum(name in names for names in missed) for name in slo.bounds}
    rate = len(metrics) / seconds
    low, high = (None if end is None else end * rate for end in wilson(passed, len(metrics)))
    return Goodput(len(metrics), passed, seconds, misses, failed, low, high)


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
