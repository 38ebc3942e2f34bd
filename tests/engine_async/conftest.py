"""Two checkpoints: one with real weights and short contexts, one with random weights that runs for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import tiny_model
from helpers.tokenizers import save_whole, write_byte_tokenizer

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole("llama3.1", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contexts so long that no request ends by itself while a test looks. Load with load_format="random"."""
    folder = tmp_path_factory.mktemp("endless")
    config = tiny_model("llama2").config().to_dict() | {"max_position_embeddings": 65536}
    config |= {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder)
    return folder
