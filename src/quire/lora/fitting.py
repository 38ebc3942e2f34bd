"""An adapter and the programs of its base model, one a rank: what it may change, and how slots are filled with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from quire.executor.base import AdapterSlots, Runnable
from quire.executor.stored_adapters import TakesStored
from quire.lora import BLOCK_BYTES
from quire.lora.adapter import F32, Adapter, AdapterNumbers, LowRank, MatrixRows
from quire.program.program import Program
from quire.program.tensors import Adapted, AdaptedPart, AdapterShape
from quire.quant.floats import FloatsOrBits, floats
from quire.types import CheckpointError

LARGEST = 3.38e38  # a little below bfloat16's largest number
_PANEL = 64  # rows that are packed together

Places = dict[str, list[tuple[Adapted, int]]]


def check_fits(programs: Sequence[Program], adapter: Adapter, max_rank: int) -> None:
    """Raise CheckpointError naming the key and the limit unless a slot can be filled with an adapter."""
    where = f"adapter {adapter.name}"
    if not adapter.parts and not adapter.modules_to_save:
        raise CheckpointError(f"{where}: changes no module")
    own = {each.module: each.param.parts[0].shape for program in programs for each in program.owned}
    for key, whole in adapter.modules_to_save.items():
        if key not in own:
            raise CheckpointError(
                f"{where}: modules_to_save: {key}: there is no room for whole weights: use "
                "--lora-target-modules modules_to_save"
            )
        if whole.shape != own[key]:
            raise CheckpointError(
                f"{where}: modules_to_save: {key}: {list(whole.shape)} is not {list(own[key])}"
            )
    places = _places(programs)
    for key, part in adapter.parts.items():
        if key not in places:
            raise CheckpointError(f"{where}: {key}: {_why_not(key, places)}")
        _check_part(f"{where}: {key}", part, places[key], max_rank)


def _why_not(key: str, places: Places) -> str:
    """Why adapters may not change a module."""
    names = {"embed_tokens": "embed_tokens", "lm_head": "lm_head", "experts": "experts"}
    group = next((names[word] for word in names if f".{word}." in f".{key}."), "")
    if group:
        return f"there is no room for it: use --lora-target-modules {group}"
    return (
        "no linear that adapters may change has this name; those of attention and of dense feed-forwards may be, with "
        f"names such as {min(places, default='none')}"
    )


def _check_part(where: str, part: LowRank, places: list[tuple[Adapted, int]], max_rank: int) -> None:
    (cols, rows), rank = _sizes(places), len(part.a)
    turned = any(adapted.shared or adapted.parts[number].turned for adapted, number in places)
    if turned and (part.magnitude is not None or part.gain is not None):
        raise CheckpointError(f"{where}: DoRA of this module is not supported")
    if not 1 <= rank <= max_rank:
        raise CheckpointError(f"{where}: rank {rank} is not in [1, {max_rank}] (max_lora_rank)")
    if part.a.shape != (rank, cols) or part.b.shape != (rows, rank):
        raise CheckpointError(
            f"{where}: lora_A {list(part.a.shape)} and lora_B {list(part.b.shape)} are not [{rank}, {cols}] and "
            f"[{rows}, {rank}], as the base model has them"
        )
    vectors = [("lora_magnitude_vector", part.magnitude), ("its gain", part.gain)]
    found = [(name, vector) for name, vector in vectors if vector is not None]
    for name, vector in found:
        if vector.shape != (rows,):
            raise CheckpointError(f"{where}: {name} {list(vector.shape)} is not [{rows}]")
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = [(name, vector, 1.0) for name, vector in found]
        for name, matrix, scale in [*scaled, ("lora_A", part.a, 1.0), ("lora_B", part.b, part.scale)]:
            if not _largest(matrix) * np.float32(abs(scale)) <= LARGEST:  # rounding keeps the order
                raise CheckpointError(f"{where}: {name} holds a number that is not finite")


def _largest(numbers: FloatsOrBits) -> np.float32:
    """The largest magnitude; NaN if there is one."""
    if numbers.dtype == np.uint16:  # magnitudes of bfloat16 sort like integers
        numbers = floats((numbers & np.uint16(0x7FFF)).max(keepdims=True))
    found: np.float32 = np.maximum(numbers.max(), -numbers.min())
    return found


def _sizes(places: list[tuple[Adapted, int]]) -> tuple[int, int]:
    """Columns and rows of a module, of which each place has all columns and some rows, and all places all of them."""
    cols, rows = 0, 0
    for adapted, number in places:
        part = adapted.parts[number]
        cols, whole = (part.rows, adapted.cols) if part.turned else (adapted.cols, part.rows)
        rows = max(rows, *(stop for _, stop in part.pieces or ((0, whole),)))
    return cols, rows


def shape_of(program: Program, adapter: AdapterNumbers) -> AdapterShape:
    """What an adapter that fits takes room for with this program; it has gains, no magnitudes."""
    return _shape(program, _places([program]), adapter)


def _shape(program: Program, places: Places, adapter: AdapterNumbers) -> AdapterShape:
    parts: dict[str, list[tuple[int, bool]]] = {}
    for key, outline in adapter.outline.items():
        for adapted, number in places.get(key, ()):
            parts.setdefault(adapted.name, [(0, False)] * len(adapted.parts))[number] = outline
    return AdapterShape(parts, [own.name for own in program.owned if own.module in adapter.modules_to_save])


def fill_slot(executor: Runnable, slot: int, adapter: AdapterNumbers) -> None:
    """Fill an unused slot of all ranks with an adapter that fits; B is multiplied by the scale before it is rounded.

    Raises RuntimeError if too few pages are free or a rank has ended, and what reading raises; what the slot has then
    is not defined.
    """
    ranks = [(slots, _places([slots.program])) for slots in executor.adapter_slots]
    for slots, places in ranks:
        slots.open_adapter(slot, _shape(slots.program, places, adapter))
        _put_whole(slots, slot, adapter.modules_to_save)
    for key, part in adapter.each(but=_put_stored(slot, ranks, adapter)):
        for slots, places in ranks:
            for adapted, number in places.get(key, ()):
                a, b, gain, scale = _matrices(part, adapted.parts[number])
                slots.put_adapter(slot, adapted.name, number, a, b, gain, scale)
    for slots, _ in ranks:
        slots.settle_adapters()


def _put_stored(
    slot: int, ranks: Sequence[tuple[AdapterSlots, Places]], adapter: AdapterNumbers
) -> Collection[str]:
    """Put what the file of an adapter has as a slot takes it; returns the modules that are in the slot now."""
    slots, places = ranks[0]
    if len(ranks) > 1 or not isinstance(slots, TakesStored):
        return ()
    file, pairs = adapter.stored()
    plain = {key: pair for key, pair in pairs.items() if all(map(_is_plain, places.get(key, ())))}
    put = [(at.name, number, pair) for key, pair in plain.items() for at, number in places.get(key, ())]
    if put:
        slots.put_stored(slot, file, put)
    return plain.keys()


def _is_plain(place: tuple[Adapted, int]) -> bool:
    """Whether a part takes A and B as they are."""
    adapted, number = place
    return not (adapted.shared or adapted.parts[number].turned or adapted.parts[number].pieces)


def clear_slot(executor: Runnable, slot: int) -> None:
    """Empty a slot of all ranks."""
    for slots in executor.adapter_slots:
        slots.clear_adapter(slot)


def _put_whole(slots: AdapterSlots, slot: int, whole: Mapping[str, MatrixRows]) -> None:
    """Fill the parameters that an adapter replaces."""
    for own in slots.program.owned:
        if (matrix := whole.get(own.module)) is not None:
            start = own.param.parts[0].first
            for first, rows in _blocks(matrix, start, start + own.param.rows):
                slots.put_own_rows(slot, own.name, first - start, rows)


def _blocks(whole: MatrixRows, start: int, stop: int) -> Iterator[tuple[int, F32]]:
    """Rows `start` … `stop` - 1 of a matrix by blocks, with the first row of each."""
    step = max(1, BLOCK_BYTES // (4 * _PANEL * whole.shape[1])) * _PANEL
    for first in range(start, stop, step):
        yield first, whole[first : min(first + step, stop)]


def _matrices(part: LowRank, to: AdaptedPart) -> tuple[FloatsOrBits, FloatsOrBits, F32 | None, float]:
    """A, B, gain and the scale of B of a module as a part of a linear takes them."""
    b, gain = part.b, part.gain
    if to.pieces:
        b = np.concatenate([b[first:stop] for first, stop in to.pieces])
        gain = None if gain is None else np.concatenate([gain[first:stop] for first, stop in to.pieces])
    if to.turned:
        return (floats(b) * np.float32(part.scale)).T, part.a.T, None, 1.0
    return part.a, b, gain, part.scale


def _places(programs: Sequence[Program]) -> Places:
    """By module of the checkpoint: the linears that are made of it, and which part of each."""
    found: Places = {}
    for program in programs:
        for adapted in program.adapted:
            for number, part in enumerate(adapted.parts):
                found.setdefault(part.module, []).append((adapted, number))
    return found
