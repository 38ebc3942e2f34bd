"""Optimizers, their schedule, and checkpoints of a run as safetensors."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak`, then a cosine down to `floor` times the peak at `horizon`.

    A run of fewer steps than its horizon cools down: over its last `cooldown` steps the rate also falls linearly.
    """

    peak: float
    steps: int
    warmup: int
    horizon: int = 0  # 0: the number of steps
    cooldown: int = 0
    floor: float = 0.02

    def rate(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, (self.horizon or self.steps) - self.warmup)
        rate = self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
        return rate * max(self.floor, min(1.0, (self.steps - step) / max(1, self.cooldown)))


EMBEDDING_RATE = 0.3


class Optimizer:
    """AdamW for embeddings and norms; for the matrices of the blocks Muon (Jordan et al. 2024) or AdamW.

    Muon steps are scaled to the root mean square of AdamW's. Embeddings and norms learn at EMBEDDING_RATE of the
    matrices' rate: faster ones move too much for the matrices to learn to copy them.
    """

    def __init__(self, model: nn.Module, *, muon: bool, weight_decay: float = 0.1) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in named if p.dim() < 2 or "embed" in n]
        betas = (0.9, 0.95)
        self._parts: list[torch.optim.Optimizer] = []
        self._slow: torch.optim.Optimizer | None = None
        if others:
            self._slow = torch.optim.AdamW(others, lr=0.0, betas=betas, weight_decay=0.0)
            self._parts.append(self._slow)
        if muon:
            self._parts.append(
                torch.optim.Muon(matrices, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        else:
            self._parts.append(torch.optim.AdamW(matrices, lr=0.0, betas=betas, weight_decay=weight_decay))
        self._parameters = [p for _, p in named]

    def step(self, rate: float, clip: float = 1.0) -> float:
        """Clip, update, clear. Returns the gradient's norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self._parameters, clip))
        for part in self._parts:
            share = EMBEDDING_RATE if part is self._slow else 1.0
            for group in part.param_groups:
                group["lr"] = rate * share
            part.step()
            part.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Every moment as a flat mapping of tensors."""
        out: dict[str, Tensor] = {}
        for i, part in enumerate(self._parts):
            for index, values in part.state_dict()["state"].items():
                for name, value in values.items():
                    out[f"optimizer.{i}.{index}.{name}"] = torch.as_tensor(value).contiguous()
        return out

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state`."""
        for i, part in enumerate(self._parts):
            state: dict[int, dict[str, Any]] = {}
            for key, value in tensors.items():
                owner, index, name = key.removeprefix("optimizer.").split(".")
                if int(owner) == i:
                    state.setdefault(int(index), {})[name] = value
            part.load_state_dict({**part.state_dict(), "state": state})


def save_run(path: Path, step: int, model: nn.Module, optimizer: Optimizer) -> None:
    """One file with weights and moments; it replaces the last one only when it is complete."""
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()} | optimizer.state()
    unfinished = path.with_suffix(".tmp")
    save_file(tensors, str(unfinished), metadata={"run": json.dumps({"step": step})})
    unfinished.replace(path)


def load_run(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Restore a run; returns the next step."""
    tensors = load_file(str(path))
    with safe_open(str(path), "pt") as file:
        step = int(json.loads(file.metadata()["run"])["step"])
    model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    optimizer.load({k: v for k, v in tensors.items() if k.startswith("optimizer.")})
    return step
