"""docs/formats.md says what the code reads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_are_current() -> None:
    spec = importlib.util.spec_from_file_location("formats_table", ROOT / "tools" / "formats_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text()
    assert module.render(page) == page, "run python -m tools.formats_table"


def test_files_of_gguf_are_found_from_the_page() -> None:
    page, source = (ROOT / "docs" / "formats.md").read_text(), ROOT / "src" / "quire"
    files = [path.relative_to(source).as_posix() for path in source.rglob("*.py")]
    own = [name for name in files if "gguf" in name or "ggml" in name]
    assert len(own) > 8
    assert [name for name in own if f"`{name}`" not in page] == []
