"""Random adapters of low rank, and the same model with one of them merged into its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from helpers.adapters import PREFIX, peft_folder
from quire.executor.base import Limits, Runnable
from quire.lora.adapter import F32, Adapter, LowRank
from quire.lora.base_modules import BaseModules
from quire.offline.convert import convert
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.lowering import LoraRoom
from quire.program.memory import adapter_layout, largest_adapter
from quire.program.program import Program
from quire.program.tensors import AdapterShape
from quire.spec import ModelSpec


def random_matrix(random: np.random.Generator, rows: int, cols: int) -> F32:
    """Numbers that bfloat16 holds, so that nothing is rounded when they go into a slot."""
    found = (random.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
    return (found.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def room(rank: int, *, whole: bool = False) -> LoraRoom:
    """Room for everything that adapters of that rank can change; `whole` matrices too."""
    return LoraRoom(rank, embedding=True, head=True, experts=True, whole=whole)


def random_adapter(
    spec: ModelSpec, seed: int, rank: int = 4, *, only: Sequence[str] = (), scale: float = 2.0,
    every: bool = False, dora: bool = False,
) -> Adapter:  # fmt: skip
    """An adapter of the linears that adapters change unasked, or of those whose module's name ends as `only` says.

    `every`: of everything that can be of low rank. `dora`: with magnitudes near 1, of those that can have them.
    """
    random, parts = np.random.default_rng(seed), {}
    shapes = BaseModules.of(spec).shapes
    taken = lower(spec, NumberFormats(), lora=room(rank) if every else LoraRoom(rank)).adapted
    places = [(adapted, part) for adapted in taken for part in adapted.parts]
    for module in dict.fromkeys(part.module for _, part in places):
        if only and not module.endswith(tuple(only)):
            continue
        rows, cols = shapes[module]
        a, b = random_matrix(random, rank, cols), random_matrix(random, rows, rank)
        turned = any(adapted.shared or part.turned for adapted, part in places if part.module == module)
        magnitude = None
        if dora and turned:
            continue
        if dora:
            magnitude = (1 + 0.2 * random.standard_normal(rows)).astype(np.float32)
        parts[module] = LowRank(a, b, scale, magnitude)
    content = repr((seed, rank, only, scale, every, dora)).encode()
    return Adapter(f"random-{seed}", hashlib.sha256(content).hexdigest(), rank, parts, {})


def write_adapter(folder: Path, adapter: Adapter) -> Path:
    """A PEFT folder with an adapter whose parts have one scale."""
    tensors: dict[str, F32] = {}
    saved = [module.rpartition(".")[2] for module in adapter.modules_to_save]
    for module, part in adapter.parts.items():
        if module.endswith("embed_tokens"):
            tensors[f"{PREFIX}{module}.lora_embedding_A"] = np.ascontiguousarray(part.b.T)
            tensors[f"{PREFIX}{module}.lora_embedding_B"] = np.ascontiguousarray(part.a.T)
            continue
        tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"] = (
            part.a,
            part.b,
        )
        if part.magnitude is not None:
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = part.magnitude
    for module, whole in adapter.modules_to_save.items():
        tensors[f"{PREFIX}{module}.weight"] = whole[0 : whole.shape[0]]
    scales = {part.scale for part in adapter.parts.values()}
    dora = any(part.magnitude is not None for part in adapter.parts.values())
    return peft_folder(
        folder, tensors, r=adapter.rank, lora_alpha=adapter.rank * next(iter(scales), 1.0), use_dora=dora,
        modules_to_save=saved,
    )  # fmt: skip


def merge(folder: Path, adapter: Adapter, to: Path) -> Path:
    """A float32 checkpoint with an adapter merged into its weights."""
    convert(
        str(folder), to, adapters=[(str(write_adapter(to.with_name(f"{to.name}-adapter"), adapter)), 1.0)]
    )
    return to


def pooled(limits: Limits, program: Program) -> Limits:
    """The same limits with pages for the largest adapter in every slot."""
    largest = largest_adapter(program)
    pages = adapter_layout(program).pages(largest.parts, largest.own)
    return replace(limits, adapter_pages=limits.max_loras * pages)


def fill_random(executor: Runnable, slot: int, seed: int, rank: int, *, whole: bool = False) -> None:
    """Fill every part of a slot with random numbers, a part of each with gains; `whole` matrices too."""
    random, program = np.random.default_rng(seed), executor.program
    parts = {
        each.name: [(rank, n % 2 == 0 and not each.shared) for n in range(len(each.parts))]
        for each in program.adapted
    }
    executor.open_adapter(slot, AdapterShape(parts, [own.name for own in program.owned if whole]))
    for adapted in program.adapted:
        shared: tuple[F32, F32] | None = None
        for number, rows in enumerate(adapted.rows):
            a, b = random_matrix(random, rank, adapted.cols), random_matrix(random, rows, rank)
            if shared and adapted.shared:
                a, b = (shared[0], b) if adapted.shared == "a" else (a, shared[1])
            shared = a, b
            gain = random.standard_normal(rows).astype(np.float32) * np.float32(0.3)
            executor.put_adapter(
                slot, adapted.name, number, a, b, gain if number % 2 == 0 and not adapted.shared else None
            )
    for own in executor.program.owned if whole else ():
        matrix = random_matrix(random, own.param.rows, own.param.cols)
        for first in range(0, len(matrix), 50):  # no whole panels
            executor.put_own_rows(slot, own.name, first, matrix[first : first + 50])
