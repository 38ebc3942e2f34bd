"""Linears of bf16, f16 and 2:4: a row has the same bits alone and among any number of others."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.fours import drop_two
from quire import _native
from quire.executor.base import F32, Limits, StepArrays
from quire.executor.native import NativeExecutor
from quire.program.formats import DType, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.ops.linear import Linear
from quire.program.program import Program
from quire.spec import MLP, Attention, Layer, ModelSpec, NormSpec, Rope

VOCAB = 40
# One row block; two or three; tall tiles of each height; more than those; several tasks of rows.
ROWS = (2, 6, 7, 15, 16, 17, 18, 19, 20, 23, 24, 25, 31, 35, 36, 37, 48, 60, 61, 121)


def program_of(weights: DType, dim: int, vocab: int = VOCAB, linears: WeightFormat | None = None) -> Program:
    """One layer whose linears leave partial panels."""
    attention = Attention(4, 2, 16, Rope(1e4, 16), 0.25, qkv_bias=True)
    spec = ModelSpec(vocab, dim, (Layer(attention, MLP(72)),), norm=NormSpec(eps=1e-5), max_positions=64)
    return lower(spec, NumberFormats(weights, "bf16" if weights == "bf16" else "f32", linears))


def executor_of(
    program: Program, limits: Limits, isa: str, stored: type[np.floating] = np.float32, *, fours: bool = False
) -> tuple[NativeExecutor, StepArrays]:
    """The program with random weights, rounded to `stored`, ready to run; `fours`: in the pattern 2:4."""
    executor = NativeExecutor(program, threads=2, isa=isa)
    for seed, param in enumerate(program.params):
        offset = 0
        for part in param.parts:
            random = np.random.default_rng([seed, offset])
            data = random.standard_normal(part.shape).astype(stored).astype(np.float32)
            if fours and param.kind == "linear":
                drop_two(data, seed)
            executor.put(param, offset, data, "F32")
            offset += part.rows
    arrays = StepArrays(limits, len(program.cache_groups))
    executor.bind(limits, arrays)
    return executor, arrays


def set_step(arrays: StepArrays, ids: np.ndarray) -> int:
    """Sequences of one token each."""
    n = len(ids)
    arrays.token_ids[:n], arrays.positions[:n], arrays.slots[:n] = ids, 0, range(n)
    arrays.query_start[: n + 1] = range(n + 1)
    for table in arrays.block_tables:
        table[:n, 0] = range(n)
    return n


def outputs(executor: NativeExecutor, arrays: StepArrays, out: str, ids: np.ndarray) -> F32:
    """What the layer's first linear makes of sequences of one token each."""
    n = set_step(arrays, ids)
    executor.run(n, n, 0)
    return executor.read(out, n)


@pytest.mark.parametrize("isa", _native.supported_isas())
@pytest.mark.parametrize("weights", ["bf16", "f16"])
@pytest.mark.parametrize("dim", [50, 2102])  # less than four steps over; two or three blocks of k
def test_same_bits_for_any_number_of_rows(weights: DType, dim: int, isa: str) -> None:
    program = program_of(weights, dim)
    limits = Limits(max_tokens=128, max_rows=128, max_logit_rows=4, max_len=64, num_blocks=140)
    index, op = next((i, op) for i, op in enumerate(program.ops) if isinstance(op, Linear))
    executor, arrays = executor_of(program, limits, isa)
    executor.stop_after(index)
    alone = np.concatenate([outputs(executor, arrays, op.out, np.array([i])) for i in range(VOCAB)])
    assert len(np.unique(alone[:, 0])) == VOCAB
    for rows in ROWS:
        ids = np.random.default_rng(rows).integers(0, VOCAB, rows)
        found = outputs(executor, arrays, op.out, ids)
        assert np.array_equal(found.view(np.uint32), alone[ids].view(np.uint32)), rows


@pytest.mark.parametrize("isa", _native.supported_isas())
@pytest.mark.parametrize("dim", [51, 2102])  # half a step over
def test_float16_has_the_bits_of_float32(dim: int, isa: str) -> None:
    """Numbers that float16 holds: a step of any height, and the head, in both formats; not in bfloat16."""
    limits = Limits(max_tokens=128, max_rows=128, max_logit_rows=8, max_len=64, num_blocks=140)

    def logits(weights: DType, rows: int) -> F32:
        executor, arrays = executor_of(program_of(weights, dim), limits, isa, np.float16)
        n = set_step(arrays, np.random.default_rng(rows).integers(0, VOCAB, rows))
        arrays.logit_rows[:8] = np.arange(8) % rows
        return executor.run(n, n, 8)["logits"].copy()

    for rows in (1, 3, 8, 20, 61, 121):
        exact = logits("f32", rows)
        assert np.isfinite(exact).all()
        assert np.array_equal(logits("f16", rows).view(np.uint32), exact.view(np.uint32)), rows
        assert not np.array_equal(logits("bf16", rows), exact)


@pytest.mark.parametrize("isa", _native.supported_isas())
@pytest.mark.parametrize("weights", ["bf16", "f16"])
def test_logits_of_many_rows_are_those_of_few(weights: DType, isa: str) -> None:
    """The head: whole panels without a bias, and one that is not whole."""
    vocab = 200
    program = program_of(weights, 50, vocab)
    limits = Limits(max_tokens=64, max_rows=64, max_logit_rows=64, max_len=64, num_blocks=64)
    executor, arrays = executor_of(program, limits, isa)
    ids = np.random.default_rng(0).integers(0, vocab, 62)
    arrays.logit_rows[:64] = range(64)

    def logits(ids: np.ndarray) -> F32:
        n = set_step(arrays, ids)
        return executor.run(n, n, n)["logits"].copy()

    few = np.concatenate([logits(ids[i : i + 2]) for i in range(0, len(ids), 2)])
    assert np.isfinite(few).all()
    for rows in (12, 16, 31, 62):  # in blocks, in tall tiles, in blocks
        assert np.array_equal(logits(ids[:rows]).view(np.uint32), few[:rows].view(np.uint32))


@pytest.mark.parametrize("isa", _native.supported_isas())
@pytest.mark.parametrize("dim", [52, 2104])  # two or three blocks of k
def test_two_of_four_has_the_bits_of_bfloat16(dim: int, isa: str) -> None:
    """A step of any height, with the pairs in registers or widened, beside the same weights with their zeros."""
    limits = Limits(max_tokens=128, max_rows=128, max_logit_rows=8, max_len=64, num_blocks=140)
    made = [
        executor_of(program_of("bf16", dim, linears=linears), limits, isa, fours=True)
        for linears in (WeightFormat("bf16_24"), None)
    ]
    for rows in (1, 2, 3, 4, 5, 8, 20, 61, 121):
        found = []
        for executor, arrays in made:
            n = set_step(arrays, np.random.default_rng(rows).integers(0, VOCAB, rows))
            arrays.logit_rows[:8] = np.arange(8) % rows
            found.append(executor.run(n, n, 8)["logits"].copy())
        assert np.isfinite(found[1]).all()
        assert np.array_equal(*(logits.view(np.uint32) for logits in found)), rows


def test_a_third_of_four_is_refused() -> None:
    program = program_of("bf16", 52, linears=WeightFormat("bf16_24"))
    executor, param = NativeExecutor(program, threads=1), program.param("layers.0.down")
    data = np.zeros(param.parts[0].shape, np.float32)
    data[3, [4, 6]], data[5, 9:11] = 1, -1
    assert executor.put_checked(param, 0, data, "F32") is None
    data[5, 8] = -0.0  # is zero
    assert executor.put_checked(param, 0, data, "F32") is None
    data[5, 11] = 1
    assert executor.put_checked(param, 0, data, "F32") == 5 * data.shape[1] + 11
