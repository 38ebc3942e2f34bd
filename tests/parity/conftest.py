"""Checkpoints and reference logits, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from helpers.checkpoints import TinyModel, load_reference, random_tokens, reference_logits, save

torch.set_num_threads(1)  # tiny models: more threads only wait for each other


@dataclass
class Golden:
    """A saved checkpoint and what transformers computes with it."""

    folder: Path
    model: Any
    _logits: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)

    def logits(self, seed: int) -> npt.NDArray[np.float32]:
        """Reference logits of random_tokens(seed)."""
        if seed not in self._logits:
            self._logits[seed] = reference_logits(self.model, random_tokens(seed))
        return self._logits[seed]

    def bfloat16_logits(self, seed: int) -> npt.NDArray[np.float32]:
        """What transformers computes in bfloat16 with the stored weights."""
        model = load_reference(self.folder, torch.bfloat16)
        return reference_logits(model, random_tokens(seed))


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Golden]:
    """golden(model, dtype=torch.float32): the checkpoint of a tiny model stored in dtype."""
    made: dict[tuple[str, torch.dtype], Golden] = {}

    def get(model: TinyModel, dtype: torch.dtype = torch.float32) -> Golden:
        key = model.name, dtype
        if key not in made:
            folder = tmp_path_factory.mktemp(model.name)
            made[key] = Golden(folder, save(model, folder, dtype))
        return made[key]

    return get
