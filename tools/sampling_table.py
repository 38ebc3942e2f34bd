"""Generates the parameters in docs/sampling.md: python -m tools.sampling_table rewrites them, a test compares."""

from __future__ import annotations

import json
from pathlib import Path

from tools.marked_tables import replaced

from quire.parameters import Parameter, Structure
from quire.types import PARAMETERS

PAGE = Path(__file__).parents[1] / "docs" / "sampling.md"


def _row(name: str, known: Parameter) -> str:
    values = {
        float: "number in ", int: "integer in ", bool: "true or false", Structure: "a `StructuredOutput`",
    }.get(known.kind, f"up to {known.high}")  # fmt: skip
    if known.kind in {float, int}:
        values += known.range
    default = "" if known.default in (None, (), {}) else str(known.default).lower()
    if known.default and isinstance(known.default, tuple):
        default = " ".join(f"`{json.dumps(text)}`" for text in known.default)
    names = ", ".join(f"`{called}` ({source})" for source, called in known.names.items() if called != name)
    return f"| `{name}` | {default} | {values} | {known.help} | {names} |"


def render(page: str) -> str:
    """The page with the current parameters."""
    rows = "\n".join(_row(name, known) for name, known in PARAMETERS.items())
    head = "| parameter | default | values | what it does | called elsewhere |\n|---|---|---|---|---|\n"
    return replaced(page, "parameters", f"{head}{rows}\n")


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
