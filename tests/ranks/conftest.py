"""Checkpoints that ranks can split, made once a session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import tiny_model
from helpers.rank_processes import Wide, wider
from helpers.tokenizers import save_whole

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    """wide(name, dtype=torch.float32, **more): folder of a tiny model that ranks can split; `more` is of its config."""
    made: dict[tuple[Any, ...], Path] = {}

    def get(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
        key = name, dtype, *more.items()
        if key not in made:
            model = wider(tiny_model(name))
            folder = tmp_path_factory.mktemp(name)
            made[key] = save_whole(replace(model, overrides=model.overrides | more), folder, dtype)
        return made[key]

    return get
