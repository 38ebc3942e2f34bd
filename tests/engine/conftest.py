"""Checkpoints with a tokenizer, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.tokenizers import Folder, save_whole

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """checkpoint(name, dtype=torch.float32): folder of a tiny model with a byte-level tokenizer of its size."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            made[name, dtype] = save_whole(name, tmp_path_factory.mktemp(name), dtype)
        return made[name, dtype]

    return get
