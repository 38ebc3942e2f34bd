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


def test_papers_have_pages_that_name_parts_and_tests() -> None:
    pages = {page.name: page.read_text() for page in (ROOT / "docs/papers").glob("*.md")}
    listed = re.findall(r"\(papers/([\w-]+\.md)\)", (ROOT / "docs/papers.md").read_text())
    assert sorted(listed) == sorted(pages)
    assert re.findall(r"papers/([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text()) == listed
    assert len(pages) >= 24
    for name, text in pages.items():
        parts, tests, difference = re.findall(
            r"^## [^\n]+\n\n(.*?)(?=\n## |\Z)", text, re.DOTALL | re.MULTILINE
        )
        assert re.search(r"\]\(\.\./\.\./(src/quire|csrc)/", parts), name
        assert "](../../tests/" in tests, name
        assert all((ROOT / path).exists() for path in re.findall(r"\.\./\.\./([\w/.]+)", parts + tests)), name
        assert "See it: " in difference, name


def test_the_comparison_has_a_source_in_every_cell() -> None:
    text = (ROOT / "docs/compare.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) >= 17
    for name, *cells in rows:
        assert all("](" in cell or cell.strip() == "–" for cell in cells), name


def test_the_comparison_is_that_of_the_lesson() -> None:
    assert compare_page.PAGE.read_text() == compare_page.render(), "run python -m tools.compare_page"
