"""A roofline plot (Williams et al. 2009) as SVG: rates of ops, or of the steps of a run, over their intensity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from quire.bench.kernels import CACHED
from quire.bench.results import MachineLimits, Result
from quire.bench.svg import AxisScale

_WIDTH, _HEIGHT = 960, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, _WIDTH - 230, 50, _HEIGHT - 50
_COLOURS = ("#3465a4", "#cc0000", "#4e9a06", "#c4a000", "#75507b", "#ce5c00", "#06989a", "#555753")
_SHAPES = {  # corners of marks; a circle has none
    "circle": (),
    "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
    "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
    "triangle": ((0, -5), (5, 4), (-5, 4)),
}
_MOST_STEPS = 400  # of a run, evenly: more marks hide each other


def points_of(result: Result) -> list[dict[str, Any]]:
    """What a result has for the plot: the computing ops of `quire bench kernels`, the steps of `throughput`."""
    ops = [row for row in result.tables.get("ops", []) if row["flops"] and row["bytes"]]
    steps = [row for row in result.tables.get("steps", []) if row.get("flops") and row.get("bytes")]
    return ops or [_step(result, row) for row in steps[:: len(steps) // _MOST_STEPS + 1]]


def _step(result: Result, row: dict[str, Any]) -> dict[str, Any]:
    rates = {f"{name}_per_second": row[name] / row["seconds"] for name in ("flops", "bytes")}
    return row | rates | {"op": row["kind"], "name": "step", "format": result.settings.get("weights", "")}


def roofline(result: Result) -> str:
    """Draw `points_of` a result under the limits that were measured around them."""
    limits = result.limits
    if limits is None:
        raise ValueError("plot: the result contains no measured limits")
    points = points_of(result)
    x, y = _axes(points, limits)
    colours = {
        name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(dict.fromkeys(map(_series, points)))
    }
    kinds = dict.fromkeys(point["op"] for point in points)
    shapes = {name: list(_SHAPES)[i % len(_SHAPES)] for i, name in enumerate(kinds)}
    what = "Ops" if result.tables.get("ops") else "Steps of the run"
    title = f"{what} and the limits of the machine: {result.environment.cpu}, {limits.threads} threads, {limits.isa}"
    marks = (_point(x, y, point, colours[_series(point)], shapes[point["op"]]) for point in points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plain" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
        *_grid(x, y), *_roofs(x, y, limits), *marks, *_legend(colours, shapes), "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _axes(points: Sequence[dict[str, Any]], limits: MachineLimits) -> tuple[AxisScale, AxisScale]:
    """Whole powers of ten: intensity in FLOP/byte to the right, FLOP/s upwards."""
    top, bandwidth = max(peak.median for peak in limits.compute.values()), limits.bandwidth.median
    rates = [top, *(point["flops_per_second"] for point in points)]
    intensities = [0.5, top / bandwidth, *(point["flops"] / point["bytes"] for point in points)]

    def scale(values: list[float], start: float, end: float) -> AxisScale:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return AxisScale(10.0**low, 10.0 ** max(high, low + 1), start, end, log=True)

    return scale(intensities, _LEFT, _RIGHT), scale(rates, _BOTTOM, _TOP)


def _series(point: dict[str, Any]) -> str:
    shape = f"{point['shape']} " if point.get("shape") else ""
    return f"{shape}{point['kv']} KV" if point["op"] in CACHED else f"{shape}{point['format']}"


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, title: str = "") -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" {stroke}><title>{escape(title)}</title></path>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def _powers(scale: AxisScale) -> list[float]:
    first = round(math.log10(scale.low))
    return [10.0**power for power in range(first, round(math.log10(scale.high)) + 1)]


def _grid(x: AxisScale, y: AxisScale) -> Iterator[str]:
    for value in _powers(x):
        yield _line(x(value), _TOP, x(value), _BOTTOM, 'stroke="#ddd"')
        yield _text(x(value), _BOTTOM + 18, f"{value:,g}", ' text-anchor="middle"')
    for value in _powers(y):
        yield _line(_LEFT, y(value), _RIGHT, y(value), 'stroke="#ddd"')
        yield _text(_LEFT - 6, y(value) + 4, f"{value / 1e9:,g}", ' text-anchor="end"')
    yield _text((_LEFT + _RIGHT) / 2, _HEIGHT - 10, "FLOP per byte", ' text-anchor="middle"')
    yield _text(14, _TOP - 12, "GFLOP/s")


def _roofs(x: AxisScale, y: AxisScale, limits: MachineLimits) -> Iterator[str]:
    """The slope of the memory bandwidth, its rate written along it, and the flat roof of each number format."""
    bandwidth, stroke = limits.bandwidth.median, 'stroke="#222" stroke-width="1.5"'
    top = max(peak.median for peak in limits.compute.values())
    left = max(x.low, y.low / bandwidth)
    slope, rate = (x(left), y(left * bandwidth)), f"memory reads {bandwidth / 1e9:.1f} GB/s"
    yield _line(*slope, x(top / bandwidth), y(top), stroke, rate)
    rise, run = y(10 * left * bandwidth) - slope[1], x(10 * left) - slope[0]
    turn = f"rotate({math.degrees(math.atan2(rise, run)):.1f} {slope[0]:.1f} {slope[1]:.1f})"
    yield _text(slope[0] + 16, slope[1] - 6, rate, f' transform="{turn}"')
    for name, peak in limits.compute.items():
        at = y(peak.median)
        yield _line(x(peak.median / bandwidth), at, _RIGHT, at, stroke)
        yield _text(_RIGHT - 4, at - 5, f"{name} {peak.median / 1e9:.0f} GFLOP/s", ' text-anchor="end"')


def _point(x: AxisScale, y: AxisScale, point: dict[str, Any], colour: str, shape: str) -> str:
    share = f"{point['share']:.0%} of {point['bound']}" if point["share"] is not None else "in caches"
    title = (
        f"{point.get('shape', '')} {point['format']} {point['op']} {point['name']}, {point['rows']} rows: "
        f"{point['bytes_per_second'] / 1e9:.1f} GB/s, {point['flops_per_second'] / 1e9:.0f} GFLOP/s, {share}"
    )
    return _mark(
        shape, x(point["flops"] / point["bytes"]), y(point["flops_per_second"]), colour, title.strip()
    )


def _mark(shape: str, x: float, y: float, colour: str, title: str = "") -> str:
    style = f'fill="{colour}" fill-opacity="0.7"'
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    if corners := _SHAPES[shape]:
        points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
        return f'<polygon points="{points}" {style}>{tooltip}</polygon>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {style}>{tooltip}</circle>'


def _legend(colours: dict[str, str], shapes: dict[str, str]) -> Iterator[str]:
    formats = [(name, "circle", colour) for name, colour in colours.items()]
    kinds = [(name, shape, "#555753") for name, shape in shapes.items()]
    for row, (name, shape, colour) in enumerate([*formats, *kinds]):
        y = _TOP + 10 + 18 * row + (8 if row >= len(formats) else 0)
        yield _mark(shape, _RIGHT + 20, y - 4, colour)
        yield _text(_RIGHT + 32, y, name)
