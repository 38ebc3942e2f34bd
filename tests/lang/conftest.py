"""The shipped model, whose tokenizer merges and whose template writes control tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.memory import memory_for
from quire import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, max_num_seqs=32, memory=memory_for(2**29)) as made:
        yield made
