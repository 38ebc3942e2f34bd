"""Generates the options in docs/server.md: python -m tools.options_table rewrites them, a test compares."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from tools.marked_tables import replaced

from quire.cli.main import command_parser

PAGE = Path(__file__).parents[1] / "docs" / "server.md"
_DEFAULT = re.compile(r" \(default: (.*)\)$")


def _row(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%").replace("|", "\\|")
    found = _DEFAULT.search(text)
    text = _DEFAULT.sub("", text)
    if action.choices:
        text += f" ({', '.join(f'`{choice}`' for choice in action.choices)})"
    long = [flag for flag in action.option_strings if flag.startswith("--") and not flag.startswith("--no-")]
    flags = [*long, *(flag for flag in action.option_strings if not flag.startswith("--"))]
    return f"| {', '.join(f'`{flag}`' for flag in flags)} | {found[1] if found else ''} | {text} |"


def _tables() -> Iterator[str]:
    for group in command_parser("serve")._action_groups:
        shown = [a for a in group._group_actions if a.help != argparse.SUPPRESS and a.option_strings]
        rows = [_row(action) for action in shown if action.dest != "help"]
        if rows:
            title = "general" if group.title == "options" else group.title
            yield "\n".join(
                [f"**{title}**", "", "| option | default | what it does |", "|---|---|---|", *rows, ""]
            )


def render(page: str) -> str:
    """The page with its current options."""
    return replaced(page, "options", "\n".join(_tables()))


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
