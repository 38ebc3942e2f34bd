"""A served checkpoint for other people's clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.checkpoints import TinyModel, save
from helpers.server import LiveServer, serving
from helpers.tokenizers import write_byte_tokenizer


@pytest.fixture(scope="session")
def client_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clients") / "model"
    save(TinyModel("served", "LlamaConfig", {"max_position_embeddings": 2048}), path)
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def live(client_folder: Path) -> Iterator[LiveServer]:
    options = {"served_model_name": ("tiny",), "api_key": ("secret",), "max_num_queued_reqs": 2}
    with serving(client_folder, {"max_num_seqs": 2}, **options) as server:
        yield server
