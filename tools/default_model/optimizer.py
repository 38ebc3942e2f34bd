"""Optimizers, their schedule, and checkpoints of a run as safetensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak`, which stays until step `start`; then down to nothing over `cooldown` steps.

    The way down is 1 - sqrt (Hägele et al. 2024, arXiv 2405.18392). Without `start` there is none yet.
    """

    peak: float
    warmup: int
    start: int | None = None
    cooldown: int = 0

    @property
    def end(self) -> int | None:
        """The number of steps of the whole run, once it is known."""
        return None if self.start is None else self.start + self.cooldown

    def rate(self, step: int) -> float:
        rate = self.peak * min(1.0, (step + 1) / max(1, self.warmup))
        if self.start is None or step < self.start:
            return rate
        return rate * (1 - math.sqrt((step - self.start + 1) / (self.cooldown + 1)))


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made nearly orthogonal (Jordan et al. 2024); steps have AdamW's root mean square.

    Unlike torch's, it works on all matrices of one size together, and multiplies in bfloat16 under autocast alone.
    """

    MOMENTUM = 0.95
    NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
    ROUNDS = 5

    def __init__(self, matrices: list[nn.Parameter], *, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    alike.setdefault(weight.shape, []).append(weight)
            for shape, weights in alike.items():
                grads = [weight.grad for weight in weights]
                kept = [self._momentum(weight) for weight in weights]
                torch._foreach_lerp_(kept, grads, 1 - self.MOMENTUM)
                steps = self._orthogonal(torch.stack(torch._foreach_lerp(grads, kept, self.MOMENTUM)))
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, steps.unbind(), alpha=-group["lr"] * 0.2 * max(shape) ** 0.5)

    def _momentum(self, weight: nn.Parameter) -> Tensor:
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        kept: Tensor = state["momentum"]
        return kept

    def _orthogonal(self, x: Tensor) -> Tensor:
        """Each matrix of [n, rows, columns] with all singular values brought near 1."""
        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        kind = x.dtype
        a, b, c = self.NEWTON_SCHULZ
        for _ in range(self.ROUNDS):
            square = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
        return (x.mT if tall else x).to(kind)


EMBEDDING_RATE = 0.3


class Optimizer:
    """AdamW for embeddings and norms; for the matrices of the blocks Muon or AdamW.

    Embeddings and norms learn at EMBEDDING_RATE of the
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
            self._parts.append(Muon(matrices, weight_decay=weight_decay))
        else:
            self._parts.append(torch.optim.AdamW(matrices, lr=0.0, betas=betas, weight_decay=weight_decay))
        self._parameters = [p for _, p in named]

    def step(self, rate: float, clip: float = 1.0) -> Tensor:
        """Clip, update, clear. Returns the gradient's norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self._parameters, clip)
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


def save_run(path: Path, facts: Mapping[str, float], model: nn.Module, optimizer: Optimizer) -> None:
    """One file with weights, moments and `facts`; it replaces the last one only when it is complete."""
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()} | optimizer.state()
    unfinished = path.with_suffix(".tmp")
    save_file(tensors, str(unfinished), metadata={"run": json.dumps(dict(facts))})
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_run(path: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    """Restore a run; returns its facts."""
    tensors = load_file(str(path))
    with safe_open(str(path), "pt") as file:
        facts: dict[str, float] = json.loads(file.metadata()["run"])
    model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    optimizer.load({k: v for k, v in tensors.items() if k.startswith("optimizer.")})
    return facts
