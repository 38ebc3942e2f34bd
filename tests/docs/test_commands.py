"""Every command of the program has its place in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from tools import compare_page

import quire
from quire.cli.main import COMMANDS

ROOT = Path(quire.__file__).parents[2]


def test_every_command_is_documented() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    missing = [name for name in COMMANDS if f"quire {name}" not in text]
    assert not missing


def test_papers_name_parts_and_tests_that_exist() -> None:
    text = (ROOT / "docs/papers.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 18
    for paper, parts, tests, difference in rows:
        named = [ROOT / "src/quire" / name for name in re.findall(r"`([\w/]+\.py)`", parts)]
        named += [ROOT / name for name in re.findall(r"`(csrc/[\w/]+\.h|tests/[\w/]+\.py)`", parts + tests)]
        assert len(named) >= 2, paper
        assert all(path.exists() for path in named), (paper, named)
        assert difference.strip()


def test_the_comparison_has_a_source_in_every_cell() -> None:
    text = (ROOT / "docs/compare.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) >= 17
    for name, *cells in rows:
        assert all("](" in cell or cell.strip() == "–" for cell in cells), name


def test_the_comparison_is_that_of_the_lesson() -> None:
    assert compare_page.PAGE.read_text() == compare_page.render(), "run python -m tools.compare_page"
