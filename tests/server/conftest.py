"""A server on a tiny checkpoint, shared by a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.checkpoints import TinyModel, save
from helpers.server import LiveServer, serving
from helpers.tokenizers import write_byte_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    save(TinyModel("served", "LlamaConfig", {"max_position_embeddings": 65_536}), path)
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, served_model_name=("tiny", "also-tiny")) as live:
        yield live
