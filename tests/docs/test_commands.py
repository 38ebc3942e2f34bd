"""Every command of the program has its place in the documentation."""

from __future__ import annotations

from pathlib import Path

import quire
from quire.cli.main import COMMANDS

ROOT = Path(quire.__file__).parents[2]


def test_every_command_is_documented() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    missing = [name for name in COMMANDS if f"quire {name}" not in text]
    assert not missing
