"""The executors that the parity tests run, and how far each may be from transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.numpy import load_file

from quire.executor.base import Executor
from quire.executor.torch import TorchExecutor
from quire.program.lower import NumberFormats, lower
from quire.program.ops import Program
from quire.spec.facts import read_model


@dataclass(frozen=True)
class Backend:
    """An executor by name. `tolerance` bounds |logit difference| in float32, where logits reach about 3."""

    name: str
    make: Callable[[Program], Executor]
    tolerance: float

    def __str__(self) -> str:
        return self.name

    def load(self, folder: Path, formats: NumberFormats) -> Executor:
        """The checkpoint of a folder in an executor, ready to bind."""
        executor = self.make(lower(read_model(folder).spec, formats))
        tensors = load_file(folder / "model.safetensors")
        for param in executor.program.params:
            offset = 0
            for part in param.parts:
                executor.put(param, offset, tensors[part.tensor], "F32")
                offset += part.rows
        return executor


TORCH = Backend("torch", TorchExecutor, 1e-5)
BACKENDS = [TORCH]
if torch.cuda.is_available():
    BACKENDS.append(Backend("torch-cuda", lambda program: TorchExecutor(program, "cuda"), 1e-4))
