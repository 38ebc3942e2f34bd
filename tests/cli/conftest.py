"""A checkpoint folder with a tokenizer for the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tokenizers import save_whole


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole("qwen3", tmp_path_factory.mktemp("cli") / "model")
