"""A server's Prometheus page."""

from __future__ import annotations

import re
from collections.abc import Mapping

LabelledValue = tuple[Mapping[str, str], float]
MetricsPage = dict[str, list[LabelledValue]]

_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\}\s*|\s+)(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MAX_LINES = 200_000


def read_page(text: str) -> MetricsPage:
    """Samples by name, with their labels. Lines that are no samples are skipped."""
    found: MetricsPage = {}
    for line in text.split("\n", _MAX_LINES)[:_MAX_LINES]:
        match = _LINE.match(line) if line and line[0] != "#" else None
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        found.setdefault(match[1], []).append((dict(_LABEL.findall(match[2] or "")), value))
    return found
