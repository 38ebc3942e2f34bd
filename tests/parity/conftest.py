"""Checkpoints, made once a session."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import TinyModel, save
from helpers.golden import Golden, MakeGolden

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> MakeGolden:
    """golden(model, dtype=torch.float32): the checkpoint of a tiny model stored in dtype."""
    made: dict[tuple[str, torch.dtype], Golden] = {}

    def get(model: TinyModel, dtype: torch.dtype = torch.float32) -> Golden:
        key = model.name, dtype
        if key not in made:
            folder = tmp_path_factory.mktemp(model.name)
            made[key] = Golden(folder, save(model, folder, dtype))
        return made[key]

    return get
