"""Links between the pages of the documentation lead somewhere: to a file, and to a heading where they name one."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\[[^\]\n]*\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    heads = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", head).strip().lower() for head in heads)
    return frozenset(re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in plain)


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_the_site_has_every_page() -> None:
    """`make docs` fails without one; its packages are not here."""
    listed = re.findall(r"- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_a_wrong_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# One `two`, three\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#one-two-three) [c](there.md#none) [d](gone.md) `[e](gone.md)` [f](#g)"
    )
    assert broken(page) == ["there.md#none", "gone.md", "#g"]
