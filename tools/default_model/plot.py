"""Loss curve: CSV rows in, an SVG picture out, with no plotting library."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 360, 60, 40, 30


def loss_curve(log: Path, out: Path, title: str) -> None:
    """Draw column `loss` (and `eval_loss` where given) of the CSV over `tokens`, on a log scale."""
    with log.open() as file:
        rows = list(csv.DictReader(file))
    train = _smooth([(float(r["tokens"]), float(r["loss"])) for r in rows])
    held = [(float(r["tokens"]), float(r["eval_loss"])) for r in rows if r["eval_loss"]]
    values = [v for _, v in train + held]
    low, high = math.log10(min(values)), math.log10(max(values))
    last = max(t for t, _ in train)

    def point(tokens: float, loss: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 20) * tokens / last
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - math.log10(loss)) / max(high - low, 1e-9)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/><text x="{_LEFT}" y="18">{title}</text>',
        *_grid(point, low, high, last),
        f'<polyline fill="none" stroke="#3465a4" stroke-width="1.5" points="{" ".join(point(*p) for p in train)}"/>',
        f'<polyline fill="none" stroke="#cc0000" stroke-width="2" points="{" ".join(point(*p) for p in held)}"/>',
        f'<text x="{_WIDTH - 260}" y="18" fill="#3465a4">training loss</text>',
        f'<text x="{_WIDTH - 150}" y="18" fill="#cc0000">held-out loss</text></svg>',
    ]
    out.write_text("\n".join(parts) + "\n")


def _smooth(points: list[tuple[float, float]], weight: float = 0.9) -> list[tuple[float, float]]:
    """Exponential moving average, thinned to a few hundred points."""
    out, mean = [], points[0][1]
    for tokens, loss in points:
        mean = weight * mean + (1 - weight) * loss
        out.append((tokens, mean))
    return out[:: max(1, len(out) // 400)]


def _grid(point: Callable[[float, float], str], low: float, high: float, last: float) -> list[str]:
    lines = []
    for loss in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10):
        if low <= math.log10(loss) <= high:
            a, b = point(0, loss), point(last, loss)
            y = a.split(",")[1]
            lines.append(f'<polyline stroke="#ddd" fill="none" points="{a} {b}"/>')
            lines.append(f'<text x="8" y="{y}">{loss:g} nat</text>')
    for share in (0.25, 0.5, 0.75, 1.0):
        x = point(last * share, 10**low).split(",")[0]
        lines.append(
            f'<text x="{x}" y="{_HEIGHT - 12}" text-anchor="end">{last * share / 1e6:.1f} M tokens</text>'
        )
    return lines
