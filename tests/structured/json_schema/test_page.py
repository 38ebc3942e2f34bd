"""docs/json_schema.md lists the keywords and formats that are enforced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.structured.json_schema import HANDLERS
from quire.structured.json_schema.string_formats import NAMES

PAGE = Path(__file__).parents[3] / "docs" / "json_schema.md"
if not PAGE.exists():  # an installed package
    pytest.skip("the page is not here", allow_module_level=True)


def test_the_table_has_every_keyword_once() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), flags=re.M)
    assert sorted(rows) == sorted(HANDLERS)


def test_the_page_lists_the_formats() -> None:
    found = re.search(r"<!-- formats -->(.*?)<!-- end -->", PAGE.read_text(), flags=re.S)
    assert found is not None
    assert found[1] == ", ".join(NAMES)
