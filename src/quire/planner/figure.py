"""A result of a calculator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Figure(NamedTuple):
    """A result: what it is, its value (a number, a text, or a fact), its unit, and a remark."""

    label: str
    value: float | str | bool
    unit: str = ""
    remark: str = ""

    def shown(self) -> str:
        """Value and unit as people write them: four digits that count, thousands apart."""
        value = self.value
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, str):
            return value
        if value == int(value) or abs(value) >= 10_000:
            text = f"{value:,.0f}"
        else:
            text = f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"
        return f"{text} {self.unit}".rstrip()


Figures = Iterator[Figure]


def at_least(value: float) -> int:
    """The next whole number, but for what the arithmetic of floats adds."""
    return math.ceil(value * (1 - 1e-12))
