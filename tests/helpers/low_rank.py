"""Random adapters of low rank, and the same model with one of them merged into its weights."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from quire.lora.adapter import F32, Adapter, LowRank
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.program import Program
from quire.spec import ModelSpec


def random_matrix(random: np.random.Generator, rows: int, cols: int) -> F32:
    """Numbers that bfloat16 holds, so that nothing is rounded when they go into a slot."""
    found = (random.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
    return (found.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def random_adapter(
    spec: ModelSpec, seed: int, rank: int = 4, *, only: Sequence[str] = (), scale: float = 2.0
) -> Adapter:
    """An adapter of all linears that adapters may change, or of those whose module's name ends as `only` says."""
    random, parts = np.random.default_rng(seed), {}
    for adapted in lower(spec, NumberFormats(), lora_rank=rank).adapted:
        for part in adapted.parts:
            a, b = random_matrix(random, rank, adapted.cols), random_matrix(random, part.rows, rank)
            if not only or part.module.endswith(tuple(only)):
                parts[part.module] = LowRank(a, b, scale)
    content = b"".join(part.a.tobytes() + part.b.tobytes() for part in parts.values())
    return Adapter(f"random-{seed}", hashlib.sha256(content).hexdigest(), rank, parts, {})


def merge(folder: Path, adapter: Adapter, to: Path) -> Path:
    """A copy of a float32 checkpoint in which every changed weight is W + scale · B A."""
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    for module, part in adapter.parts.items():
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + np.float32(part.scale) * (part.b @ part.a)
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


def slot_parts(program: Program, seed: int, rank: int) -> list[tuple[str, int, F32, F32]]:
    """Random arguments of put_adapter for every part of every linear, without the slot."""
    random = np.random.default_rng(seed)
    return [
        (
            adapted.name,
            number,
            random_matrix(random, rank, adapted.cols),
            random_matrix(random, rows, rank),
        )
        for adapted in program.adapted
        for number, rows in enumerate(adapted.rows)
    ]
