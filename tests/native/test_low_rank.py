"""Adapters of low rank in the kernels: the definition's numbers, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from helpers.low_rank import fill_random, pooled, random_matrix, room
from helpers.pairs import pairwise
from helpers.specs import EXPERTS, decoder_spec, moe_spec, with_latents
from helpers.stepper import Stepper, compare_buffers
from quire import _native
from quire.executor.base import F32, Executor, Limits
from quire.executor.native import NativeExecutor
from quire.executor.torch import TorchExecutor
from quire.loader import RandomWeights, load
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.memory import adapter_layout
from quire.program.program import Program
from quire.program.tensors import AdapterShape
from quire.quant.floats import from_float32

ISAS = _native.supported_isas()
I8, I4 = WeightFormat("i8", Groups(64, "bf16", rotated=True)), WeightFormat("i4", Groups(32))
FORMATS = {
    "f32": NumberFormats("f32", "f32"),
    "bf16": NumberFormats("bf16", "bf16"),
    "f16": NumberFormats("f16", "f16"),
    "i8": NumberFormats("bf16", "bf16", I8),
    "i4": NumberFormats("f32", "f32", I4),
}
RANK, SLOTS = 20, 3  # a whole vector of ranks and a part of one
LIMITS = Limits(max_tokens=96, max_rows=6, max_logit_rows=96, max_len=128, num_blocks=60, max_loras=SLOTS)
# 40 query and 2 x 20 columns of key and value: parts begin inside vectors of columns.
SPEC = decoder_spec(90, 64, 128, (2, 1, 20), [0, 0])
_MOE = EXPERTS[2]
SPECS = {
    "dense": SPEC,
    "biases": decoder_spec(90, 64, 96, (2, 1, 20), [0, 0], tied=True, bias=True),
    "experts": moe_spec(
        _MOE.router, _MOE.width, act=_MOE.act, bias=True, shared=_MOE.shared, shared_gate=True, layers=2
    ),
    "latents": with_latents(SPEC, 24, bias=True),
}


# Biases change what follows the sums alone: but for bfloat16 they are behind the marker.
CASES = [
    pytest.param(*case.values, id=case.id, marks=case.marks or [pytest.mark.models])
    if case.values[0] == "biases" and case.values[1] != "bf16"
    else case
    for case in pairwise([*SPECS], [*FORMATS], ISAS)
]


def adapted(formats: str, spec: str = "dense") -> Program:
    return lower(SPECS[spec], FORMATS[formats], lora=room(RANK, whole=True))


def made(program: Program, executor: Executor, stepper: Stepper, ranks: Mapping[int, int]) -> Executor:
    """An executor with random weights, and an adapter in each slot named, of this rank; the even ones are whole."""
    load(program.params, RandomWeights(program.params, 3), executor)
    executor.bind(stepper.limits, stepper.arrays)
    for slot, rank in ranks.items():
        fill_random(executor, slot, 100 + slot, rank, whole=slot % 2 == 0)
    return executor


def run(
    executor: Executor, stepper: Stepper, counts: Mapping[int, int], slots: Mapping[int, int]
) -> dict[int, F32]:
    """Logits of every token of a step, by sequence; `slots` are those of sequences with an adapter."""
    size = stepper.fill(counts)
    ends = {tokens.start: number for number, tokens in size.tokens_of.items()}
    for row in range(size.num_rows):
        number = ends[int(stepper.arrays.query_start[row])]
        stepper.arrays.adapters[stepper.arrays.slots[row]] = slots.get(number, -1)
    logits = stepper.logits(executor, size)
    return {number: logits[tokens] for number, tokens in size.tokens_of.items()}


def texts(first: int = 0) -> list[list[int]]:
    seeds = range(first, first + 6)
    return [np.random.default_rng(seed).integers(0, SPEC.vocab, 60).tolist() for seed in seeds]


@pytest.mark.parametrize(("spec", "formats", "isa"), CASES)
def test_buffers(spec: str, formats: str, isa: str) -> None:
    """Every op, where all rows have adapters: prompts in chunks, then decodes."""
    program = adapted(formats, spec)
    limits = pooled(LIMITS, program)
    stepper = Stepper(program, limits)
    native, reference = (
        made(program, each, stepper, {0: RANK, 1: RANK, 2: RANK})
        for each in (NativeExecutor(program, threads=2, isa=isa), TorchExecutor(program))
    )
    # Texts in which no two experts of a token are so nearly tied that rounding decides between them.
    first = 60 if (spec, formats) == ("experts", "i8") else 0
    a, b, c = (stepper.add(text) for text in texts(first)[:3])
    typical, largest = {"f32": (5e-6, 1e-4), "f16": (3e-4, 3e-3), "bf16": (2e-2, 2e-1)}.get(
        formats, (5e-2, 5e-1)
    )
    compared = 0
    for counts in ({a: 33, b: 17}, {a: 1, b: 20, c: 5}, {a: 1, b: 1, c: 1}):
        size = stepper.fill(counts)
        stepper.arrays.adapters[stepper.arrays.slots[: size.num_rows]] = [0, 2, 1][: size.num_rows]
        for difference in compare_buffers(native, reference, size):
            if "shrunk" not in difference.buffer:  # ranks of padding are not filled
                compared += 1
                assert difference.rms <= typical * max(difference.scale, 1.0), difference
                assert difference.max_abs <= largest * max(difference.scale, 1.0), difference
    assert compared > 30


def alone(formats: str, isa: str, spec: str, ranks: Mapping[int, int], slots: Iterable[int]) -> Iterator[F32]:
    """Logits of each text with the adapter of its slot, alone on one thread, whole."""
    program = adapted(formats, spec)
    stepper = Stepper(program, pooled(LIMITS, program))
    executor = made(program, NativeExecutor(program, threads=1, isa=isa), stepper, ranks)
    for text, slot in zip(texts(), slots, strict=True):
        sequence = stepper.add(text)
        yield run(executor, stepper, {sequence: 40}, {sequence: slot})[sequence]
        stepper.drop(sequence)


@pytest.mark.parametrize(("spec", "formats", "isa"), CASES)
def test_the_same_bits_in_any_company(spec: str, formats: str, isa: str) -> None:
    """Six sequences with three adapters of several ranks and without one, in chunks, on three threads."""
    ranks = {0: RANK, 1: 3, 2: 16}
    program = adapted(formats, spec)
    stepper = Stepper(program, pooled(LIMITS, program), seed=4)
    executor = made(program, NativeExecutor(program, threads=3, isa=isa), stepper, ranks)
    numbers = [stepper.add(text) for text in texts()]
    slots = dict(zip(numbers, [0, -1, 1, 2, 1, -1], strict=True))
    found: dict[int, list[F32]] = {number: [] for number in numbers}
    random, left = np.random.default_rng(7), dict.fromkeys(numbers, 40)
    while left:
        some = random.permutation(list(left)).tolist()[: random.integers(1, 7)]
        counts = {number: min(left[number], int(random.integers(1, 16))) for number in some}
        for number, rows in run(executor, stepper, counts, slots).items():
            found[number].append(rows)
        left = {number: count - counts.get(number, 0) for number, count in left.items()}
        left = {number: count for number, count in left.items() if count}
    for number, expected in zip(numbers, alone(formats, isa, spec, ranks, slots.values()), strict=True):
        assert np.array_equal(np.concatenate(found[number]), expected), f"sequence {number}"


@pytest.mark.parametrize(("spec", "formats"), pairwise([*SPECS], [*FORMATS]))
def test_rows_without_an_adapter_have_the_bits_of_a_program_without_adapters(spec: str, formats: str) -> None:
    program, limits = lower(SPECS[spec], FORMATS[formats]), replace(LIMITS, max_loras=0)
    stepper = Stepper(program, limits)
    executor = made(program, NativeExecutor(program, threads=2), stepper, {})
    for index, expected in enumerate(alone(formats, ISAS[0], spec, {0: RANK}, [-1] * 6)):
        sequence = stepper.add(texts()[index])
        assert np.array_equal(stepper.step(executor, {sequence: 40})[sequence], expected)
        stepper.drop(sequence)


def test_a_slot_holds_what_was_put_last() -> None:
    """Of the adapter before, with a greater rank and more parts, nothing is left."""
    program = adapted("f32")
    sequences = []
    for before in (False, True):
        stepper = Stepper(program, pooled(LIMITS, program))
        executor = made(program, NativeExecutor(program, threads=2), stepper, {1: RANK} if before else {})
        executor.open_adapter(1, AdapterShape({"layers.0.qkv": [(0, False), (2, False), (0, False)]}, []))
        random = np.random.default_rng(9)
        matrices = random_matrix(random, 2, 64), random_matrix(random, 20, 2)
        executor.put_adapter(1, "layers.0.qkv", 1, *matrices)
        sequence = stepper.add(texts()[0])
        sequences.append(run(executor, stepper, {sequence: 30}, {sequence: 1})[sequence])
    assert np.array_equal(*sequences)


@pytest.mark.parametrize("isa", ISAS)
def test_bits_of_bfloat16_fill_a_slot_as_their_floats_do(isa: str) -> None:
    """With scales that round and one that does not; the second part has odd ranks and ends inside a vector."""
    program = adapted("f32")
    parts = [(4, False), (3, False), (0, False)]
    for scale in (1.0, 0.3):
        found = []
        for bits in (False, True):
            stepper = Stepper(program, pooled(LIMITS, program))
            executor = made(program, NativeExecutor(program, threads=1, isa=isa), stepper, {})
            executor.open_adapter(0, AdapterShape({"layers.0.qkv": parts}, []))
            random = np.random.default_rng(2)
            for part, rows in ((0, 40), (1, 20)):
                rank = parts[part][0]
                a, b = random_matrix(random, rank, 64), random_matrix(random, rows, rank)
                if bits:
                    both = (from_float32(each, "BF16") for each in (a, b))
                    executor.put_adapter(0, "layers.0.qkv", part, *both, scale=scale)
                else:
                    executor.put_adapter(0, "layers.0.qkv", part, a, b * np.float32(scale))
            sequence = stepper.add(texts()[0])
            found.append(run(executor, stepper, {sequence: 30}, {sequence: 0})[sequence])
        assert np.array_equal(*found)


def test_slots_take_what_was_planned() -> None:
    program = adapted("f32")
    stepper = Stepper(program, pooled(LIMITS, program))
    native = made(program, NativeExecutor(program, threads=1), stepper, {})
    pages = stepper.limits.adapter_pages
    assert native.memory()["adapters"] == adapter_layout(program).pool_bytes(SLOTS, pages)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_what_does_not_fit_is_refused(kind: str) -> None:
    program = adapted("f32")
    executor = NativeExecutor(program, threads=1) if kind == "native" else TorchExecutor(program)
    stepper = Stepper(program, pooled(LIMITS, program))
    made(program, executor, stepper, {})
    random = np.random.default_rng(0)
    a, b = random_matrix(random, 4, 64), random_matrix(random, 40, 4)
    none = [(0, False)]
    executor.open_adapter(0, AdapterShape({"layers.0.qkv": [(4, False), *none * 2]}, []))
    executor.put_adapter(0, "layers.0.qkv", 0, a, b)
    for slot, name, part, first, second in [
        (SLOTS, "layers.0.qkv", 0, a, b),
        (-1, "layers.0.qkv", 0, a, b),
        (0, "layers.0.qkv", 3, a, b),
        (0, "nothing", 0, a, b),
        (0, "layers.0.qkv", 1, a, b),
        (0, "layers.0.qkv", 0, a[:, 1:], b),
        (0, "layers.0.qkv", 0, random_matrix(random, RANK + 1, 64), random_matrix(random, 40, RANK + 1)),
    ]:
        with pytest.raises(ValueError, match=r"slot|layers|nothing"):
            executor.put_adapter(slot, name, part, first, second)
    with pytest.raises(ValueError, match="slot"):
        executor.clear_adapter(SLOTS)
    with pytest.raises(ValueError, match="slot"):
        executor.put_adapter(0, "layers.0.qkv", 0, a[:3], b[:, :3])
    for shape in (
        {"nothing": none},
        {"layers.0.qkv": none * 2},
        {"layers.0.qkv": [(RANK + 13, False), *none * 2]},
    ):
        with pytest.raises(ValueError, match=r"layers|nothing"):
            executor.open_adapter(1, AdapterShape(shape, []))
    sequence = stepper.add(texts()[0])
    with pytest.raises(ValueError, match="adapters"):
        run(executor, stepper, {sequence: 3}, {sequence: SLOTS})
