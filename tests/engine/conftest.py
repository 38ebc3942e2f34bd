"""Checkpoints with a tokenizer, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.checkpoints import save, tiny_model
from helpers.tokenizers import Folder, write_byte_tokenizer

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """checkpoint(name, dtype=torch.float32): folder of a tiny model with a byte-level tokenizer of its size."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            folder = tmp_path_factory.mktemp(name)
            save(tiny_model(name), folder, dtype)
            write_byte_tokenizer(folder)
            made[name, dtype] = folder
        return made[name, dtype]

    return get
