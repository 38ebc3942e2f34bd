"""An adapter and the program of its base model: what it may change, and how a slot is filled with it."""

from __future__ import annotations

import numpy as np

from quire.executor.base import Runnable
from quire.lora.adapter import Adapter, LowRank
from quire.program.program import Program
from quire.program.tensors import Adapted
from quire.types import CheckpointError

LARGEST = 3.38e38  # a little below bfloat16's largest number


def check_fits(program: Program, adapter: Adapter, max_rank: int) -> None:
    """Raise CheckpointError naming the key and the limit unless a slot can be filled with an adapter."""
    where = f"adapter {adapter.name}"
    if adapter.modules_to_save:
        key = min(adapter.modules_to_save)
        raise CheckpointError(f"{where}: modules_to_save: {key}: whole weights are not supported")
    if not adapter.parts:
        raise CheckpointError(f"{where}: changes no module")
    places = _places(program)
    for key, part in adapter.parts.items():
        if key not in places:
            raise CheckpointError(
                f"{where}: {key}: no linear that adapters may change has this name; those of attention and of dense "
                "feed-forwards may be, with names such as " + min(places)
            )
        adapted, number = places[key]
        _check_part(f"{where}: {key}", part, (adapted.cols, adapted.parts[number].rows), max_rank)


def _check_part(where: str, part: LowRank, sizes: tuple[int, int], max_rank: int) -> None:
    (cols, rows), rank = sizes, len(part.a)
    if part.magnitude is not None:
        raise CheckpointError(f"{where}: DoRA's magnitudes are not supported")
    if not 1 <= rank <= max_rank:
        raise CheckpointError(f"{where}: rank {rank} is not in [1, {max_rank}] (max_lora_rank)")
    if part.a.shape != (rank, cols) or part.b.shape != (rows, rank):
        raise CheckpointError(
            f"{where}: lora_A {list(part.a.shape)} and lora_B {list(part.b.shape)} are not [{rank}, {cols}] and "
            f"[{rows}, {rank}], as the base model has them"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        for name, matrix in (("lora_A", part.a), ("lora_B", part.b * np.float32(part.scale))):
            if not (np.abs(matrix) <= LARGEST).all():
                raise CheckpointError(f"{where}: {name} holds a number that is not finite")


def fill_slot(executor: Runnable, slot: int, adapter: Adapter) -> None:
    """Fill an empty or unused slot with an adapter that fits; B is multiplied by the scale before it is rounded."""
    executor.clear_adapter(slot)
    places = _places(executor.program)
    for key, part in adapter.parts.items():
        adapted, number = places[key]
        b = part.b * np.float32(part.scale)
        if pieces := adapted.parts[number].pieces:
            b = np.concatenate([b[first:stop] for first, stop in pieces])
        executor.put_adapter(slot, adapted.name, number, part.a, b)


def _places(program: Program) -> dict[str, tuple[Adapted, int]]:
    """By module of the checkpoint: its linear, and which part of it."""
    return {
        part.module: (adapted, number)
        for adapted in program.adapted
        for number, part in enumerate(adapted.parts)
    }
