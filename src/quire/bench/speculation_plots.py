"""The plot of a result of `quire bench speculation`."""

from __future__ import annotations

from collections.abc import Iterator

from quire.bench.results import Result
from quire.bench.svg import Plot, Series

_COLOURS = ("c1", "c2", "c3", "c4", "c5")


def speculation_plots(result: Result) -> Iterator[str]:
    """Plot the speed-up of each method by load, with its 95 % interval."""
    rows = result.tables["speculation"]
    streams = sorted({row["streams"] for row in rows})
    lows, highs = ([row[end] or row["speedup"] for row in rows] for end in ("speedup_low", "speedup_high"))
    plot = Plot("Speed-up by load", "streams", "speed-up", (streams[0], streams[-1]),
                (0, 1.1 * max(1.0, *highs)), log_x=True, x_ticks=streams)  # fmt: skip
    plot.rule(1.0, "without drafts")
    for place, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        own = [at for at, row in enumerate(rows) if row["method"] == method]
        points = [(rows[at]["streams"], rows[at]["speedup"]) for at in own]
        spans = [(lows[at], highs[at]) for at in own]
        plot.line(Series(method, points, _COLOURS[place % len(_COLOURS)], spans=spans))
    yield plot.svg()
