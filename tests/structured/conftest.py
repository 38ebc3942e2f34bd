"""A process that compiles grammars, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.structured.pool import GrammarPool


@pytest.fixture(scope="module")
def pool() -> Iterator[GrammarPool]:
    made = GrammarPool()
    yield made
    made.close()
