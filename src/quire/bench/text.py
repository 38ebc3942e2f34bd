"""Figures and tables as text."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def aligned(table: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """The rows of a table, each column as wide as its widest cell; columns not in `left` end at the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def figure(value: float | None) -> str:
    """Three to four significant digits; "–" for None."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if 0 < size < 0.1:
        return f"{value:.3g}"
    digits = 0 if size >= 100 or not size else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"
