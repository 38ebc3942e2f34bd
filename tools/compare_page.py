"""Makes docs/compare.md of the lesson's page: python -m tools.compare_page rewrites it, a test compares."""

from __future__ import annotations

from pathlib import Path

from quire.learn.chapters import chapter

PAGE = Path(__file__).parents[1] / "docs" / "compare.md"


def render() -> str:
    """The page as the documentation has it."""
    one = chapter("compare")
    return f"# {one.title}\n\n{one.text.lstrip()}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
