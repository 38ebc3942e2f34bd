"""A checkpoint folder with a tokenizer for the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.checkpoints import save, tiny_model
from helpers.tokenizers import write_byte_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "model"
    save(tiny_model("qwen3"), path)
    write_byte_tokenizer(path)
    return path
