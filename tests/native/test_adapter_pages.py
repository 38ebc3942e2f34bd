"""Pages of adapters: as many as ranks and modules need, from anywhere in the pool; the same bits wherever they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.low_rank import fill_random, pooled, room
from helpers.specs import decoder_spec
from helpers.stepper import Stepper
from quire.executor.base import F32, Limits
from quire.executor.native import NativeExecutor
from quire.executor.stored_adapters import StoredMatrix, StoredPair
from quire.loader import RandomWeights, load
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.lowering import LoraRoom
from quire.program.memory import adapter_layout, largest_adapter
from quire.program.program import Program
from quire.program.tensors import AdapterShape
from quire.quant.floats import from_float32

RANK, SLOTS, PAGES = 40, 6, 9
LIMITS = Limits(max_tokens=64, max_rows=1, max_logit_rows=64, max_len=64, num_blocks=8, max_loras=SLOTS)
SPEC = decoder_spec(90, 256, 512, (4, 2, 64), [0])
PROGRAM = lower(SPEC, NumberFormats("bf16", "bf16"), lora=LoraRoom(RANK))
WHOLE = lower(SPEC, NumberFormats("bf16", "bf16"), lora=room(RANK, whole=True))


def shape_of(ranks: Mapping[str, int], program: Program = PROGRAM) -> AdapterShape:
    """An adapter of some linears, all parts of one rank."""
    parts = {
        each.name: [(ranks[each.name], False)] * len(each.parts)
        for each in program.adapted
        if each.name in ranks
    }
    return AdapterShape(parts, [])


def every(rank: int, program: Program = PROGRAM) -> AdapterShape:
    return shape_of({each.name: rank for each in program.adapted}, program)


def made(program: Program, pages: int) -> tuple[NativeExecutor, Stepper]:
    stepper = Stepper(program, replace(LIMITS, adapter_pages=pages))
    executor = NativeExecutor(program, threads=1)
    load(program.params, RandomWeights(program.params, 3), executor)
    executor.bind(stepper.limits, stepper.arrays)
    return executor, stepper


def audit(held: Mapping[int, list[int]], free: int, total: int) -> None:
    """No page belongs to two slots, and none is lost."""
    taken = [page for pages in held.values() for page in pages]
    assert len(set(taken)) == len(taken), "a page has two owners"
    assert set(taken) <= set(range(total)), "a page lies outside"
    assert len(taken) + free == total, "pages are lost"


def test_the_audit_sees_what_it_should() -> None:
    audit({0: [0, 2], 1: [1]}, 1, 4)
    for held, free, told in [
        ({0: [0, 2], 1: [2]}, 1, "two owners"),
        ({0: [0, 4]}, 2, "outside"),
        ({0: [0], 1: [1]}, 1, "lost"),
    ]:
        with pytest.raises(AssertionError, match=told):
            audit(held, free, 4)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(0, SLOTS - 1),
            st.dictionaries(st.sampled_from([each.name for each in PROGRAM.adapted]), st.integers(1, RANK)),
        ),
        max_size=30,
    )
)
def test_there_is_room_whenever_enough_pages_are_free(steps: list[tuple[int, dict[str, int]]]) -> None:
    """Adapters of all sizes come and go: nothing overlaps, nothing is lost, and no order of them splits the pool."""
    executor, _ = made(PROGRAM, PAGES)
    held: dict[int, list[int]] = {}
    for slot, ranks in steps:
        shape = shape_of(ranks)
        wanted = executor.core.free_adapter_pages + len(held.pop(slot, []))
        needed = adapter_layout(PROGRAM).pages(shape.parts, shape.own)
        if needed > wanted:
            with pytest.raises(
                RuntimeError, match=f"takes {needed} pages of the pool, of which {wanted} are free"
            ):
                executor.open_adapter(slot, shape)
        else:
            executor.open_adapter(slot, shape)
            held[slot] = executor.core.adapter_pages(slot)
            assert len(held[slot]) == needed
        audit(
            {each: executor.core.adapter_pages(each) for each in range(SLOTS)},
            executor.core.free_adapter_pages,
            PAGES,
        )
        assert all(executor.core.adapter_pages(each) == pages for each, pages in held.items()), "pages moved"


def logits(executor: NativeExecutor, stepper: Stepper, slot: int) -> F32:
    sequence = stepper.add(np.random.default_rng(5).integers(0, SPEC.vocab, 40).tolist())
    size = stepper.fill({sequence: 40})
    stepper.arrays.adapters[:] = slot
    found = stepper.logits(executor, size)
    stepper.drop(sequence)
    return found


@pytest.mark.parametrize("rank", [1, 8, 16, 40])
def test_the_same_bits_wherever_pages_are(rank: int) -> None:
    """In the first pages of an empty pool; in scattered ones among other adapters, of which nothing is left."""
    largest = largest_adapter(WHOLE)
    pages = 3 * adapter_layout(WHOLE).pages(largest.parts, largest.own)
    executor, stepper = made(WHOLE, pages)
    fill_random(executor, 0, 7, rank, whole=True)
    expected, first = logits(executor, stepper, 0), executor.core.adapter_pages(0)
    random = np.random.default_rng(rank)
    for _ in range(2):
        for slot in random.permutation(SLOTS).tolist():
            executor.clear_adapter(slot)
        for slot in range(1, SLOTS):
            try:
                fill_random(executor, slot, slot, int(random.integers(1, RANK)), whole=slot == 1)
            except RuntimeError:
                break
        for slot in random.permutation(range(1, SLOTS)).tolist():
            if executor.core.free_adapter_pages < len(first):
                executor.clear_adapter(slot)
        fill_random(executor, 0, 7, rank, whole=True)
        assert executor.core.adapter_pages(0) != first, "the test moves nothing"
        assert np.array_equal(logits(executor, stepper, 0), expected)


def test_ranks_of_all_sizes_pack() -> None:
    """Where eight adapters of rank 64 fit, 64 of rank 8 do, of the shape of a model of 0.6 billion parameters."""
    spec = decoder_spec(90, 1024, 3072, (16, 8, 128), [0] * 28)
    program = lower(spec, NumberFormats("bf16", "bf16"), lora=LoraRoom(64))
    layout = adapter_layout(program)
    pages = {rank: layout.pages(every(rank, program).parts, []) for rank in (8, 64)}
    assert 8 * pages[8] <= 1.01 * pages[64]
    numbers = sum(each.cols * len(each.rows) + sum(each.rows) for each in program.adapted)
    assert 8 * 2 * numbers <= pages[8] * layout.page_bytes < 1.02 * 8 * 2 * numbers


def test_the_pool_takes_what_is_planned() -> None:
    limits = pooled(LIMITS, WHOLE)
    executor, _ = made(WHOLE, limits.adapter_pages)
    planned = adapter_layout(WHOLE).pool_bytes(SLOTS, limits.adapter_pages)
    assert executor.memory()["adapters"] == planned
    assert planned < 1.02 * limits.adapter_pages * adapter_layout(WHOLE).page_bytes


@pytest.mark.parametrize(
    ("a_type", "b_type"), [("F32", "F32"), ("BF16", "F32"), ("F32", "BF16"), ("BF16", "BF16")]
)
@pytest.mark.parametrize("rank", [3, 16, 40])
def test_a_file_gives_the_bits_of_its_matrices(a_type: str, b_type: str, rank: int, tmp_path: Path) -> None:
    """Wherever A and B lie in it, aligned or not."""
    executor, stepper = made(PROGRAM, 2 * adapter_layout(PROGRAM).pages(every(rank).parts, []))
    random, stored, put = np.random.default_rng(rank), bytearray(b"odd"), []
    for slot in range(2):
        executor.open_adapter(slot, every(rank))
    for adapted in PROGRAM.adapted:
        for number, part in enumerate(adapted.parts):
            a = random.standard_normal((rank, adapted.cols), np.float32) / 16
            b = random.standard_normal((part.rows, rank), np.float32)
            kept, places = [], []
            for matrix, kind in ((a, a_type), (b, b_type)):
                kept.append(from_float32(matrix, kind))
                places.append(StoredMatrix(len(stored), kind))
                stored += kept[-1].tobytes()
            executor.put_adapter(0, adapted.name, number, *kept, None, 0.7)
            put.append((adapted.name, number, StoredPair(*places, rank, 0.7)))
    path = tmp_path / "matrices"
    path.write_bytes(stored)
    with path.open("rb") as file:
        executor.put_stored(1, file.fileno(), put[::-1])
        assert np.array_equal(logits(executor, stepper, 0), logits(executor, stepper, 1))
        name, number, pair = put[0]
        for wrong, told in (
            ((name, 9, pair), "no such part"),
            ((name, 0, pair._replace(rank=rank + 1)), "rank"),
        ):
            with pytest.raises(ValueError, match=told):
                executor.put_stored(1, file.fileno(), [wrong])
        path.write_bytes(stored[:-1])
        with pytest.raises(RuntimeError, match="it became shorter while it was read"):
            executor.put_stored(1, file.fileno(), put)
    with pytest.raises(RuntimeError, match="Bad file descriptor"):
        executor.put_stored(1, -1, put)
