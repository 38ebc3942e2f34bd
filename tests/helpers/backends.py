"""The executors that the parity tests run, and how far each may be from transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.executor.base import Executor
from quire.executor.native import NativeExecutor
from quire.executor.torch import TorchExecutor
from quire.loader import Checkpoint, LoadRules, load
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.program import Program
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
        spec = read_model(folder).spec
        executor = self.make(lower(spec, formats))
        with Checkpoint(folder) as source:
            load(executor.program.params, source, executor, rules=LoadRules.of(spec))
        return executor


def _native(program: Program) -> Executor:
    return NativeExecutor(program, threads=2)


TORCH = Backend("torch", TorchExecutor, 1e-5)
NATIVE = Backend("native", _native, 2e-5)
BACKENDS = [TORCH, NATIVE]
if torch.cuda.is_available():
    BACKENDS.append(Backend("torch-cuda", lambda program: TorchExecutor(program, "cuda"), 1e-4))
