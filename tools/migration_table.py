"""Generates the tables in docs/migrating.md: python -m tools.migration_table rewrites them, a test compares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.marked_tables import replaced

from quire.config.elsewhere.foreign import LCPP, OLM, SGLANG, TGI, VLLM, ForeignOption
from quire.config.elsewhere.known import ROWS

PAGE = Path(__file__).parents[1] / "docs" / "migrating.md"


def _meaning(row: ForeignOption) -> str:
    if not row.to:
        return row.explanation()
    values = ", ".join(
        f"`{a}` → `{b}`" if a != b else f"`{a}`" for a, b in (row.values or {}).items() if a and b
    )
    parts = [f"`{row.to}`", f"values: {values}" if values else "", row.why]
    return "; ".join(part for part in parts if part)


def _tables() -> Iterator[str]:
    for server in (VLLM, SGLANG, LCPP, TGI, OLM):
        rows = [row for row in ROWS if server in row.servers]
        lines = (
            f"| {', '.join(f'`{name}`' for name in row.names)} | {_meaning(row).replace('|', chr(92) + '|')} |"
            for row in rows
        )
        yield "\n".join([f"### {server}", "", "| option | here |", "|---|---|", *lines, ""])


def render(page: str) -> str:
    """The page with its current tables."""
    return replaced(page, "options", "\n".join(_tables()))


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
