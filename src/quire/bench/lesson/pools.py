"""Prompts and answers on the same cards, or on cards of their own: simulation 15."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from quire.bench.lesson.plant import Plant
from quire.bench.simulated_server import Arrival
from quire.bench.statistics import percentile
from quire.bench.timeline import RequestRecord, gaps
from quire.learn.catalog import card, size
from quire.learn.scene import Chart, ChartSeries, Scene, Table
from quire.planner.devices import links
from quire.planner.figure import Figure
from quire.planner.memory_sums import kv_token_bytes, transfer
from quire.routing.transfer import transfer_seconds

MODES = ("colocated", "disaggregated")
_PROMPT, _SECONDS, _BLOCK_STEP = 1500, 12.0, 16384
_MODEL = "Llama 3 8B"


def _arrivals(load: float, seed: int) -> list[Arrival]:
    rng, at = random.Random(f"pools {seed}"), 0.0
    found: list[Arrival] = []
    while (at := at + rng.expovariate(load)) < _SECONDS or not found:
        first = 10_000 * len(found)
        found.append(Arrival(at, range(first, first + _PROMPT), rng.randint(100, 200)))
    return found


def _plants(device: str, link: str) -> dict[str, Plant]:
    known, _ = size(_MODEL)
    each = kv_token_bytes(known.layers, known.kv_heads, known.head_dim, 16, known.kv_values)
    both = Plant(model=_MODEL, device=card(device), replicas=2, chunking=False)
    moving = partial(_moving, each, links()[link])
    return {"colocated": both, "disaggregated": replace(both, prefill_replicas=1, transfer=moving)}


def _moving(each: float, gb_s: float, tokens: int) -> float:
    return transfer_seconds(each * tokens, gb_s)


def gaps_of(
    mode: str, load: float, device: str, link: str, seed: int
) -> tuple[list[RequestRecord], list[float]]:
    """The requests of a mode, and the milliseconds between the tokens of each after its second: the gap before that has
    the transfer."""
    records = _plants(device, link)[mode].serve(_arrivals(load, seed), seed=seed).records
    return records, [1e3 * gap for one in records for gap in gaps(one.times[1:])]


def pools(mode: str, load: float, device: str, link: str, seed: int) -> Scene:
    found = {name: gaps_of(name, load, device, link, seed) for name in MODES}
    records, shown = found[mode]
    first = sum(one.times[0] - one.scheduled for one in records) / len(records)
    figures = [
        Figure("ITL, median", percentile(sorted(shown), 50), "ms"),
        Figure("ITL, p99", percentile(sorted(shown), 99), "ms"),
        Figure("ITL, longest", max(shown), "ms"),
        Figure("TTFT, mean", 1e3 * first, "ms"),
        *(
            Figure(f"ITL, p99, {name}", percentile(sorted(each), 99), "ms")
            for name, (_, each) in found.items()
        ),
    ]
    known, _ = size("Llama 3 70B")
    moved = list(transfer(layers=known.layers, kv_heads=known.kv_heads, head_dim=known.head_dim))
    table = Table(
        "Moving the cache of 2,048 tokens of Llama 3 70B, against 50 ms of interference", ("what", "value", ""),
        [(one.label, one.shown(), one.remark) for one in moved],
    )  # fmt: skip
    slowest = max(records, key=lambda one: max(gaps(one.times[1:]), default=0.0))
    times = slowest.times[1:]
    chart = Chart(
        "Gaps of the answer with the longest one", "lines", "seconds", "ms between tokens",
        [ChartSeries(mode, times[1:], [1e3 * gap for gap in gaps(times)])],
    )  # fmt: skip
    return Scene(
        figures, [chart], tables=[table],
        remark="On the same cards an answer waits whenever a whole prompt of another request is computed. Separate"
        " pools have no such steps, and pay with the transfer of the cache.",
    )  # fmt: skip
