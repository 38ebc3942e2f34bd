"""Checkpoints that ranks can split, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.checkpoints import tiny_model
from helpers.rank_processes import Wide, wider
from helpers.tokenizers import save_whole

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    """wide(name, dtype=torch.float32): folder of a tiny model that ranks can split."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name, dtype] = save_whole(wider(tiny_model(name)), folder, dtype)
        return made[name, dtype]

    return get
