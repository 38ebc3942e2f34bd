"""One request among others, and what batch sizes cost: simulations 6 and 7."""

from __future__ import annotations

import itertools
import math
from functools import cache

from quire.bench.goodput import PRESETS, misses
from quire.bench.lesson.plant import Plant
from quire.bench.request_metrics import compute_metrics
from quire.bench.simulated_server import Arrival
from quire.bench.sweep import Knee, Point, knee_of
from quire.bench.timeline import RequestRecord, request_metrics
from quire.learn.catalog import card
from quire.learn.scene import Chart, ChartSeries, Scene, Table
from quire.planner.figure import Figure
from quire.planner.time_sums import latency

_MAX_BATCH = 256


def _together(plant: Plant, requests: int, prompt: int, output: int) -> list[RequestRecord]:
    """So many equal requests that come at once."""
    arrivals = [
        Arrival(0.0, range(10_000 * i, 10_000 * i + prompt), output, known=True) for i in range(requests)
    ]
    return plant.serve(arrivals).records


def _milliseconds(record: RequestRecord) -> list[float]:
    return [1e3 * (at - record.scheduled) for at in record.times]


def latency_metrics(load: int, prompt: int, output: int, model: str, device: str) -> Scene:
    """A request as its client sees it, when `load` requests come together: the last of them."""
    plant = Plant(model=model, device=card(device))
    record = _together(plant, load, prompt, output)[-1]
    times = _milliseconds(record)
    found = compute_metrics(times[0], times)
    numbers = {name: value for name, value in found.items() if value is not None}
    labels = {
        "ttft_ms": ("TTFT", "ms", "time to the first token"),
        "mean_itl_ms": ("ITL, mean", "ms", "between two tokens"),
        "p99_itl_ms": ("ITL, p99", "ms", ""),
        "tpot_ms": ("TPOT", "ms", "(E2EL − TTFT) / (tokens − 1)"),
        "e2el_ms": ("E2EL", "ms", "to the last token"),
        "tokens_per_sec": ("rate of the stream", "tokens/s", "after its first token"),
    }
    figures = [
        Figure(label, numbers[name], unit, remark) for name, (label, unit, remark) in labels.items() if name in numbers
    ]  # fmt: skip
    seen = request_metrics(record)
    table = Table(
        "Thresholds of perception", ("for", "levels", "met", "why"),
        [(name, str(slo), ", ".join(misses(slo, seen)) + " missed" if misses(slo, seen) else "yes", why)
         for name, (slo, why) in PRESETS.items()],
    )  # fmt: skip
    chart = Chart(
        "Tokens as they come", "lines", "ms", "tokens", [ChartSeries("tokens", times, [*range(1, len(times) + 1)])]
    )  # fmt: skip
    example = next(one for one in latency(ttft_ms=200, total_ms=2200, output=50) if one.unit == "ms")
    return Scene(
        figures, [chart], tables=[table],
        remark=f"TPOT divides by the tokens after the first: 200 ms to the first of 50 tokens and 2,200 ms in all are"
        f" {example.shown()}, not 40 ms.",
    )  # fmt: skip


@cache
def _curve(model: str, device: str, prompt: int, output: int) -> list[tuple[int, float, float]]:
    """Batch, TPOT in milliseconds, tokens a second of all: the first wave of requests that come at once."""
    plant = Plant(model=model, device=card(device))
    most = min(_MAX_BATCH, plant.cache_tokens // (prompt + output + 16))
    batches = sorted({*(2**power for power in range(9) if 2**power <= most), most})
    found = []
    for batch in batches:
        records = _together(plant, batch, prompt, output)
        tpot = 1e3 * max(request_metrics(one).tpot or 0.0 for one in records)
        end = max(one.finished or 0.0 for one in records)
        found.append((batch, tpot, batch * output / end))
    return found


def _edge(curve: list[tuple[int, float, float]], level: float) -> tuple[float, float] | None:
    """TPOT and tokens a second where the curve crosses the level, between two batches; None if it does not."""
    for (_, before, slow), (_, after, fast) in itertools.pairwise(curve):
        if before <= level < after:
            part = (level - before) / (after - before)
            return level, slow + part * (fast - slow)
    return None


def _knee(curve: list[tuple[int, float, float]], output: int, level: float) -> Knee:
    """The load with the most goodput, as `quire bench sweep` finds it."""
    points = []
    for _, tpot, rate in curve:
        served = tpot <= level
        points.append(
            Point(rate / output, rate / output if served else 0.0, float(served), served, {"tpot": tpot})
        )
    return knee_of(points)


def throughput_latency(slo_ms: float, prompt: int, output: int, model: str, device: str) -> Scene:
    """Larger batches: more tokens a second in all, and longer between two tokens of one answer."""
    curve = _curve(model, device, prompt, output)
    knee, edge = _knee(curve, output, slo_ms), _edge(curve, slo_ms)
    best = knee.best
    figures = [
        Figure("one request alone", curve[0][1], "ms", f"a token, {curve[0][2]:,.0f} tokens/s"),
        Figure("the largest batch", curve[-1][1], "ms", f"a token, {curve[-1][2]:,.0f} tokens/s"),
        Figure("most goodput", best.goodput, "requests/s", f"at {best.figures['tpot']:.3g} ms a token")
        if best.goodput else Figure("most goodput", 0.0, "requests/s", "no batch keeps the level"),
        Figure("edge of the zone", edge[0], "ms", f"{edge[1]:,.0f} tokens/s there")
        if edge else Figure("edge of the zone", math.nan if not best.goodput else curve[-1][1], "ms",
                            "the level is not crossed: memory ends first" if best.goodput else "below the curve"),
    ]  # fmt: skip
    rows = [
        (str(batch), f"{tpot:.3g} ms", f"{rate:,.0f}", "yes" if tpot <= slo_ms else "no")
        for batch, tpot, rate in curve
    ]
    chart = Chart(
        "Throughput and latency", "lines", "tokens/s of all", "ms a token",
        [ChartSeries("TPOT", [rate for _, _, rate in curve], [tpot for _, tpot, _ in curve])],
        levels=[("service level", slo_ms)],
    )  # fmt: skip
    return Scene(figures, [chart], tables=[Table("Batches", ("at once", "TPOT", "tokens/s", "kept"), rows)])
