"""The tools folder is no installed package: it is found from the root of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.default_model import tokenizer as tokenizers


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer, trained as the shipped one is."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizers.save(
        tokenizers.train(tokenizers.training_text(seed=3, conversations=1500), vocab=1024), folder
    )
    return folder
