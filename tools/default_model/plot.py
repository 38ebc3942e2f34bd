"""Loss curve: CSV rows in, an SVG picture out, with no plotting library."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 360, 60, 40, 30


_COLOURS = ("#3465a4", "#cc0000", "#4e9a06", "#f57900", "#75507b", "#8f5902", "#06989a", "#555753")
Series = Sequence[tuple[float, float]]


def loss_curve(log: Path, out: Path, title: str) -> None:
    """Draw column `loss` (and `eval_loss` where given) of the CSV over `tokens`, on a log scale."""
    with log.open() as file:
        rows = list(csv.DictReader(file))
    train = _smooth([(float(r["tokens"]) / 1e6, float(r["loss"])) for r in rows])
    held = [(float(r["tokens"]) / 1e6, float(r["eval_loss"])) for r in rows if r["eval_loss"]]
    curves(out, title, {"training loss": train, "held-out loss": held}, "nat", "M tokens")


def curves(out: Path, title: str, series: Mapping[str, Series], unit: str, along: str) -> None:
    """One line for each series of points, the ordinate on a log scale."""
    values = [v for points in series.values() for _, v in points]
    low, high = math.log10(min(values)), math.log10(max(values))
    last = max(t for points in series.values() for t, _ in points)

    def point(at: float, loss: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 20) * at / last
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - math.log10(loss)) / max(high - low, 1e-9)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/><text x="{_LEFT}" y="18">{title}</text>',
        *_grid(point, low, high, last, unit, along),
    ]
    for number, (name, points) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(point(*p) for p in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{line}"/>')
        parts.append(f'<text x="{_WIDTH - 150}" y="{18 + 15 * number}" fill="{colour}">{name}</text>')
    out.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _smooth(points: list[tuple[float, float]], weight: float = 0.9) -> list[tuple[float, float]]:
    """Exponential moving average, thinned to a few hundred points."""
    out, mean = [], points[0][1]
    for tokens, loss in points:
        mean = weight * mean + (1 - weight) * loss
        out.append((tokens, mean))
    return out[:: max(1, len(out) // 400)]


def _grid(
    point: Callable[[float, float], str], low: float, high: float, last: float, unit: str, along: str
) -> list[str]:
    lines = []
    for loss in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 2, 5, 10):
        if low <= math.log10(loss) <= high:
            a, b = point(0, loss), point(last, loss)
            y = a.split(",")[1]
            lines.append(f'<polyline stroke="#ddd" fill="none" points="{a} {b}"/>')
            lines.append(f'<text x="8" y="{y}">{loss:g} {unit}</text>')
    for share in (0.25, 0.5, 0.75, 1.0):
        x = point(last * share, 10**low).split(",")[0]
        lines.append(f'<text x="{x}" y="{_HEIGHT - 12}" text-anchor="end">{last * share:.1f} {along}</text>')
    return lines
