"""The plots of a result of `quire bench speculation`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.bench.results import Result
from quire.bench.svg import Plot, Series

_COLOURS = ("c1", "c2", "c3", "c4", "c5")
_APART = 0.025  # methods beside one another at a number of streams: their intervals would cover each other


def speculation_plots(result: Result) -> Iterator[str]:
    """Plot the speed-up of each method by load with 95 % intervals, acceptance by position, and the cost of steps."""
    rows = result.tables["speculation"]
    kinds = {
        method: _COLOURS[place % len(_COLOURS)]
        for place, method in enumerate(dict.fromkeys(row["method"] for row in rows))
    }
    yield _speedups(rows, kinds)
    if any(row["tried"] for row in result.tables["positions"]):
        yield _acceptance(result.tables["positions"], kinds)
    yield _costs(result.tables["row_costs"])


def _speedups(rows: list[dict[str, Any]], kinds: dict[str, str]) -> str:
    streams = sorted({row["streams"] for row in rows})
    spans = [(row["speedup_low"] or row["speedup"], row["speedup_high"] or row["speedup"]) for row in rows]
    low, high = min(1.0, *(low for low, _ in spans)), max(1.0, *(high for _, high in spans))
    plot = Plot("Speed-up by load", "streams", "speed-up", (streams[0] * 0.9, streams[-1] * 1.1),
                (0.95 * low, 1.05 * high), log_x=True, x_ticks=streams)  # fmt: skip
    plot.rule(1.0, "without drafts")
    for place, (method, kind) in enumerate(kinds.items()):
        own = [at for at, row in enumerate(rows) if row["method"] == method]
        beside = 1 + _APART * (place - (len(kinds) - 1) / 2)
        points = [(rows[at]["streams"] * beside, rows[at]["speedup"]) for at in own]
        plot.line(Series(method, points, kind, spans=[spans[at] for at in own]))
    return plot.svg()


def _acceptance(rows: list[dict[str, Any]], kinds: dict[str, str]) -> str:
    """Of the fewest streams with drafts of each method."""
    found = []
    for method, kind in kinds.items():
        own = [row for row in rows if row["method"] == method and row["tried"]]
        least = min((row["streams"] for row in own), default=0)
        points = [(row["position"], row["rate"]) for row in own if row["streams"] == least]
        found += [Series(method, points, kind)] if points else []
    last = max(2, *(series.points[-1][0] for series in found))
    plot = Plot("Acceptance by position, at the fewest streams", "position of a draft", "right, if all before it are",
                (1, last), (0, 1.05))  # fmt: skip
    for series in found:
        plot.line(series)
    return plot.svg()


def _costs(rows: list[dict[str, Any]]) -> str:
    points = [(row["tokens"], row["ratio"]) for row in rows]
    plot = Plot("What a step costs by its tokens", "tokens", "of a step with one", (1, max(2, points[-1][0])),
                (0, 1.05 * max(ratio for _, ratio in points)))  # fmt: skip
    plot.line(Series("one stream", points))
    return plot.svg()
