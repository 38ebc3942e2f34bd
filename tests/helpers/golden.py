"""A saved tiny checkpoint together with what transformers computes with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from helpers.checkpoints import load_reference, random_tokens, reference_logits


@dataclass
class Golden:
    """Reference logits [length, vocabulary] of random_tokens(seed), computed once each."""

    folder: Path
    model: Any
    _logits: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)

    def logits(self, seed: int) -> npt.NDArray[np.float32]:
        """In float32."""
        if seed not in self._logits:
            self._logits[seed] = reference_logits(self.model, random_tokens(seed))
        return self._logits[seed]

    def bfloat16_logits(self, seed: int) -> npt.NDArray[np.float32]:
        """Computed in bfloat16 with the stored weights."""
        model = load_reference(self.folder, torch.bfloat16)
        return reference_logits(model, random_tokens(seed))


MakeGolden = Callable[..., Golden]  # (model: TinyModel, dtype: torch.dtype = torch.float32)
