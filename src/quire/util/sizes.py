"""Parse and format byte sizes."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[_letter] = 1024**_power  # "6g" as docker and llama.cpp read it


def parse_size(text: str) -> int:
    """Bytes of "6GiB", "6g", "512MB" or "1073741824". Raises ValueError with the accepted forms."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; use 6GiB, 512MiB, 6GB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(size: float) -> str:
    """A size with a binary unit and three or four digits: "1.11 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
