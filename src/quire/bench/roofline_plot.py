"""A roofline plot (Williams et al. 2009) as SVG: the rate of each op over its arithmetic intensity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from quire.bench.kernels import CACHED
from quire.bench.results import MachineLimits, Result

_WIDTH, _HEIGHT = 960, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 230, 50, 50
_COLOURS = ("#3465a4", "#cc0000", "#4e9a06", "#c4a000", "#75507b", "#ce5c00", "#06989a", "#555753")
_SHAPES = ("circle", "square", "diamond", "triangle")


class _Axes:
    """Log scales: intensity in FLOP/byte to the right, FLOP/s upwards."""

    def __init__(self, points: Sequence[dict[str, Any]], limits: MachineLimits) -> None:
        top = max(peak.median for peak in limits.compute.values())
        rates = [p["flops_per_second"] for p in points] or [limits.bandwidth.median]
        intensities = [p["flops"] / p["bytes"] for p in points] or [1.0]
        self.x0 = math.floor(math.log10(min(*intensities, 0.5)))
        self.x1 = math.ceil(math.log10(max(*intensities, top / limits.bandwidth.median)))
        self.y0 = math.floor(math.log10(min(*rates, top)))
        self.y1 = math.ceil(math.log10(max(*rates, top)))

    def x(self, intensity: float) -> float:
        part = (math.log10(intensity) - self.x0) / (self.x1 - self.x0)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * part

    def y(self, rate: float) -> float:
        part = (math.log10(rate) - self.y0) / max(self.y1 - self.y0, 1)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * part


def roofline(result: Result) -> str:
    """Draw a result of `quire bench kernels`: its computing ops under the measured limits."""
    limits = result.limits
    if limits is None:
        raise ValueError("plot: the result contains no measured limits")
    points = [row for row in result.tables.get("ops", []) if row["flops"] and row["bytes"]]
    axes = _Axes(points, limits)
    formats = list(dict.fromkeys(_series(p) for p in points))
    kinds = list(dict.fromkeys(p["op"] for p in points))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(formats)}
    shapes = {name: _SHAPES[i % len(_SHAPES)] for i, name in enumerate(kinds)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plain" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">Ops and the limits of the machine: '
        f"{escape(result.environment.cpu)}, {limits.threads} threads, {escape(limits.isa)}</text>",
        *_grid(axes),
        *_roofs(axes, limits),
        *(_point(axes, p, colours[_series(p)], shapes[p["op"]]) for p in points),
        *_legend(colours, shapes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _series(point: dict[str, Any]) -> str:
    shape = f"{point['shape']} " if point.get("shape") else ""
    return f"{shape}{point['kv']} KV" if point["op"] in CACHED else f"{shape}{point['format']}"


def _grid(axes: _Axes) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    lines = []
    for power in range(axes.x0, axes.x1 + 1):
        x = axes.x(10.0**power)
        lines.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{10.0**power:,g}</text>')
    for power in range(axes.y0, axes.y1 + 1):
        y = axes.y(10.0**power)
        lines.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0 ** (power - 9):,g}</text>'
        )
    middle = (_LEFT + right) / 2
    lines.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">FLOP per byte</text>')
    lines.append(f'<text x="14" y="{_TOP - 12}">GFLOP/s</text>')
    return lines


def _roofs(axes: _Axes, limits: MachineLimits) -> list[str]:
    """The slope of the memory bandwidth, and the flat roof of each number format."""
    bandwidth = limits.bandwidth.median
    top = max(peak.median for peak in limits.compute.values())
    left = max(10.0**axes.x0, 10.0**axes.y0 / bandwidth)
    start = f"{axes.x(left):.1f},{axes.y(left * bandwidth):.1f}"
    corner = f"{axes.x(top / bandwidth):.1f},{axes.y(top):.1f}"
    lines = [
        f'<polyline points="{start} {corner}" stroke="#222" stroke-width="1.5" fill="none">'
        f"<title>memory reads {bandwidth / 1e9:.1f} GB/s</title></polyline>",
        _slope_label(axes, left, bandwidth),
    ]
    for name, peak in limits.compute.items():
        y, x = axes.y(peak.median), axes.x(peak.median / bandwidth)
        label = f"{name} {peak.median / 1e9:.0f} GFLOP/s"
        right = axes.x(10.0**axes.x1)
        lines.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" stroke="#222" stroke-width="1.5"/>'
        )
        lines.append(f'<text x="{right - 4:.1f}" y="{y - 5:.1f}" text-anchor="end">{escape(label)}</text>')
    return lines


def _slope_label(axes: _Axes, left: float, bandwidth: float) -> str:
    """The bandwidth, written along its line."""
    x, y = axes.x(left), axes.y(left * bandwidth)
    x2, y2 = axes.x(10 * left), axes.y(10 * left * bandwidth)
    angle = math.degrees(math.atan2(y2 - y, x2 - x))
    return (
        f'<text x="{x + 16:.1f}" y="{y - 6:.1f}" transform="rotate({angle:.1f} {x:.1f} {y:.1f})">'
        f"memory reads {bandwidth / 1e9:.1f} GB/s</text>"
    )


def _point(axes: _Axes, point: dict[str, Any], colour: str, shape: str) -> str:
    x, y = axes.x(point["flops"] / point["bytes"]), axes.y(point["flops_per_second"])
    share = f"{point['share']:.0%} of {point['bound']}" if point["share"] is not None else "in caches"
    title = (
        f"{point.get('shape', '')} {point['format']} {point['op']} {point['name']}, {point['rows']} rows: "
        f"{point['bytes_per_second'] / 1e9:.1f} GB/s, {point['flops_per_second'] / 1e9:.0f} GFLOP/s, {share}"
    )
    return _mark(shape, x, y, colour, title.strip())


def _mark(shape: str, x: float, y: float, colour: str, title: str = "") -> str:
    style = f'fill={quoteattr(colour)} fill-opacity="0.7"'
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {style}>{tooltip}</circle>'
    corners = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
        "triangle": ((0, -5), (5, 4), (-5, 4)),
    }[shape]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" {style}>{tooltip}</polygon>'


def _legend(colours: dict[str, str], shapes: dict[str, str]) -> list[str]:
    lines, x, y = [], _WIDTH - _RIGHT + 20, _TOP + 10
    for name, colour in colours.items():
        lines += [_mark("circle", x, y - 4, colour), f'<text x="{x + 12}" y="{y}">{escape(name)}</text>']
        y += 18
    y += 8
    for name, shape in shapes.items():
        lines += [_mark(shape, x, y - 4, "#555753"), f'<text x="{x + 12}" y="{y}">{escape(name)}</text>']
        y += 18
    return lines
