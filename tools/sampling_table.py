"""Generates the parameters in docs/sampling.md: python -m tools.sampling_table rewrites them, a test compares."""

from __future__ import annotations

import re
from pathlib import Path

from quire.parameters import Parameter, Structure
from quire.types import PARAMETERS

PAGE = Path(__file__).parents[1] / "docs" / "sampling.md"
_PLACE = re.compile(r"(<!-- parameters -->\n).*?(<!-- end -->)", re.DOTALL)


def _row(name: str, known: Parameter) -> str:
    values = {
        float: "number in ", int: "integer in ", bool: "true or false", Structure: "a `StructuredOutput`",
    }.get(known.kind, f"up to {known.high}")  # fmt: skip
    if known.kind in {float, int}:
        values += known.range
    default = "" if known.default in (None, (), {}) else str(known.default).lower()
    names = ", ".join(f"`{called}` ({source})" for source, called in known.names.items() if called != name)
    return f"| `{name}` | {default} | {values} | {known.help} | {names} |"


def render(page: str) -> str:
    """The page with the current parameters."""
    rows = "\n".join(_row(name, known) for name, known in PARAMETERS.items())
    head = "| parameter | default | values | what it does | called elsewhere |\n|---|---|---|---|---|\n"
    page, found = _PLACE.subn(lambda match: f"{match[1]}{head}{rows}\n{match[2]}", page)
    if found != 1:
        raise ValueError(f"{PAGE.name}: {found} markers for the parameters, expected one")
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
