"""The plots of a result of `quire eval`: how predictions changed, the error by layer, and outlier channels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from quire.bench.results import Result
from quire.bench.svg import Bars, Plot, Series, histogram

_COLOURS = ("c1", "c3", "c2", "c4", "c5")
_LEAST = 1e-9  # of a logarithmic axis


def divergence_plots(result: Result) -> Iterator[str]:
    """The distribution of the KL divergence over predictions."""
    rows = result.tables["predictions"]
    for text in dict.fromkeys(row["text"] for row in rows):
        values = [max(row["kl"], _LEAST) for row in rows if row["text"] == text]
        ordered = sorted(values)
        rules = [(ordered[int(share * (len(ordered) - 1))], name, "rule")
                 for share, name in ((0.5, "p50"), (0.99, "p99"))]  # fmt: skip
        yield histogram(f"KL divergence of each prediction: {text}", values, "nats", rules)


def layer_error_plots(result: Result) -> Iterator[str]:
    """The relative error of the residual stream after each layer."""
    points = [(row["layer"], row["error"]) for row in result.tables["layer_errors"]]
    top = max(error for _, error in points)
    plot = Plot("Error of the residual stream", "after layer", "|change| / |original|",
                (0, max(1, len(points) - 1)), (0, 1.1 * top or 1.0))  # fmt: skip
    plot.line(Series("error", points))
    yield plot.svg()


def channel_plots(result: Result) -> Iterator[str]:
    """Outlier channels: by layer, and all channels of the linears in which they stand out most."""
    rows = result.tables["channels"]
    yield _by_layer(rows, "Energy of the salient 1 % of input channels", "share", {
        "activations": "activation_share", "weights": "weight_share",
    })  # fmt: skip
    yield _by_layer(rows, "Largest weight", "standard deviations", {"weight": "weight_peak"})
    curves = result.tables.get("channel_curves", [])
    for name in dict.fromkeys(row["linear"] for row in curves):
        mine = [row for row in curves if row["linear"] == name]
        values = [row[key] for row in mine for key in ("activation", "weight")]
        plot = Plot(f"Channels of {name}, by size", "rank of the channel", "mean magnitude / median",
                    (1, max(row["rank"] for row in mine)), (max(min(values), 1e-3), max(values)),
                    log_x=True, log_y=True)  # fmt: skip
        for kind, key in (("c1", "activation"), ("c3", "weight")):
            points = [(row["rank"], max(row[key], 1e-3)) for row in mine]
            plot.line(Series(f"{key}s", points, kind, dots=False))
        yield plot.svg()


def weight_plots(result: Result) -> Iterator[str]:
    """The distribution of all weights of the layers' linears, in standard deviations, on a logarithmic axis."""
    rows = result.tables["weights"]
    total = sum(row["count"] for row in rows)
    edges = [rows[0]["from"], *(row["to"] for row in rows)]
    shares = [row["count"] / total for row in rows]
    least = min((share for share in shares if share > 0), default=1.0)
    plot = Plot("Weights", "standard deviations", "share, in powers of ten from the rarest", (edges[0], edges[-1]),
                (0, _decades(max(shares), least)))  # fmt: skip
    plot.bars(edges, [Bars("share", [_decades(share, least) if share else 0.0 for share in shares])])
    yield plot.svg()


def _decades(share: float, least: float) -> float:
    return math.log10(share / least) + 0.2


def _by_layer(rows: list[dict[str, Any]], title: str, unit: str, keys: dict[str, str]) -> str:
    """A line for each kind of linear and each key, by layer."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    top = max(row[key] for row in rows for key in keys.values())
    last = max(row["layer"] for row in rows)
    plot = Plot(title, "layer", unit, (0, max(last, 1)), (0, 1.1 * top or 1.0))
    for at, kind in enumerate(kinds):
        for name, key in keys.items():
            points = [(row["layer"], row[key]) for row in rows if row["kind"] == kind]
            label = kind if len(keys) == 1 else f"{kind}, {name}"
            plot.line(Series(label, points, _COLOURS[at % len(_COLOURS)], dots=name != "weights"))
    return plot.svg()
