"""Goodput: requests that met every objective, as a share and as a rate, which is a count over a duration."""

import random

from quire.bench.goodput import goodput
from quire.bench.timeline import RequestMetrics
from quire.objectives import SLO


def request(ttft_ms: float, tpot_ms: float, tokens: int = 100) -> RequestMetrics:
    gaps = [tpot_ms / 1000] * (tokens - 1)
    end = ttft_ms / 1000 + sum(gaps)
    times = {"ttft": ttft_ms / 1000, "tpot": tpot_ms / 1000, "e2e": end}
    return RequestMetrics(**times, itl=gaps, icl=gaps, exact=True, send_lag=0.0)


def main() -> None:
    rng = random.Random(0)
    fast = [request(rng.uniform(100, 300), rng.uniform(30, 80)) for _ in range(90)]
    slow = [request(rng.uniform(800, 5000), rng.uniform(100, 300)) for _ in range(10)]
    found = goodput([*fast, *slow], SLO(ttft=500, tpot=100), seconds=20)
    print(f"{found.passed} of {found.total} requests met every objective: {found.share:.0%}")
    print(f"throughput {found.total / 20:g} requests/s, goodput {found.rate:g} requests/s")
