"""Weights in groups natively: packing, products and bits against the definitions, on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.group_codes import codes_of
from helpers.stepper import Stepper
from quire import _native
from quire.executor.base import F32, Limits, StepArrays
from quire.executor.native import NativeExecutor
from quire.executor.torch import TorchExecutor
from quire.executor.torch.weights import quantize_rows
from quire.program.formats import CODE_BITS, GROUP_BITS, Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.ops.linear import Linear
from quire.program.program import Program
from quire.program.tensors import Param
from quire.quant import GroupCodes, dequantize, quantize
from quire.quant.groups import input_share, rotate
from quire.spec import MLP, Attention, Layer, ModelSpec, NormSpec, Rope

ISAS = _native.supported_isas()
FORMATS = {
    "q4_0": WeightFormat("i4", Groups(32, "f16")),
    "bf16": WeightFormat("i4", Groups(128, "bf16")),
    "gptq": WeightFormat("i4", Groups(64, "f16", "u8")),
    "q4_1": WeightFormat("i4", Groups(32, "f16", "f16")),
    "q4_k": WeightFormat("i4", Groups(32, "f16*u8", "f16*u8")),
    "two-level": WeightFormat("i4", Groups(16, "f16*u8")),
    "hqq": WeightFormat("i4", Groups(64, "f32", "f32")),
    "bf16-offsets": WeightFormat("i4", Groups(16, "bf16", "bf16")),
    "gptq2": WeightFormat("i2", Groups(64, "f16", "u8")),
    "sym2": WeightFormat("i2", Groups(16, "bf16")),
    "q2_k": WeightFormat("i2", Groups(16, "f16*u8", "f16*u8")),
    "gptq3": WeightFormat("i3", Groups(128, "f16", "u8")),
    "sym3": WeightFormat("i3", Groups(32, "f16")),
    "hqq3": WeightFormat("i3", Groups(64, "f32", "f32")),
    "q8_0": WeightFormat("i8", Groups(32, "f16")),
    "q6_k": WeightFormat("i8", Groups(16, "f32")),
    "gptq8": WeightFormat("i8", Groups(128, "f16", "u8")),
    "int8": WeightFormat("i8", Groups(128, "bf16", rotated=True)),
    "int8-64": WeightFormat("i8", Groups(64, "bf16", rotated=True)),
    "int8-32": WeightFormat("i8", Groups(32, "bf16", rotated=True)),
}
VOCAB = 150
LIMITS = Limits(max_tokens=520, max_rows=520, max_logit_rows=4, max_len=64, num_blocks=600)


def program_of(form: WeightFormat, dim: int = 300, width: int = 72) -> Program:
    """One layer over features that fill no whole group unless it must; the tied embedding is in the format, too."""
    if form.groups is not None and form.groups.rotated:
        dim, width = (
            -(-dim // form.groups.size) * form.groups.size,
            -(-width // form.groups.size) * form.groups.size,
        )
    attention = Attention(4, 2, 16, Rope(1e4, 16), 0.25, qkv_bias=True)
    spec = ModelSpec(
        VOCAB, dim, (Layer(attention, MLP(width)),), norm=NormSpec(eps=1e-5), max_positions=64, tied=True
    )
    return lower(spec, NumberFormats("f32", "f32", form, form), fused=False)


def piece(given: GroupCodes, rows: slice) -> GroupCodes:
    offsets = None if given.offsets is None else given.offsets[rows]
    factors = None if given.factors is None else given.factors[rows]
    return GroupCodes(given.codes[rows], given.scales[rows], offsets, factors)


def values_of(param: Param, seed: int) -> F32:
    assert param.groups is not None
    return dequantize(param.groups, CODE_BITS[param.dtype], codes_of(param, seed))


def fill(program: Program, *executors: NativeExecutor | TorchExecutor) -> None:
    for seed, param in enumerate(program.params):
        for executor in executors:
            if param.groups is None:
                offset = 0
                for part in param.parts:
                    data = np.random.default_rng(seed).standard_normal(part.shape).astype(np.float32)
                    executor.put(param, offset, data, "F32")
                    offset += part.rows
            else:  # in two parts that share a panel
                given = codes_of(param, seed)
                executor.put_codes(param, 0, piece(given, slice(0, 40)))
                executor.put_codes(param, 40, piece(given, slice(40, None)))


def native(
    program: Program, isa: str, threads: int = 2, limits: Limits = LIMITS
) -> tuple[NativeExecutor, StepArrays]:
    executor = NativeExecutor(program, threads=threads, isa=isa)
    fill(program, executor)
    arrays = StepArrays(limits, len(program.cache_groups))
    executor.bind(limits, arrays)
    return executor, arrays


def one_token_rows(arrays: StepArrays, ids: np.ndarray) -> int:
    """A step of sequences of one token each."""
    n = len(ids)
    arrays.token_ids[:n], arrays.positions[:n], arrays.slots[:n] = ids, 0, range(n)
    arrays.query_start[: n + 1] = range(n + 1)
    for table in arrays.block_tables:
        table[:n, 0] = range(n)
    return n


def first_linear(program: Program) -> tuple[int, Linear]:
    return next((i, op) for i, op in enumerate(program.ops) if isinstance(op, Linear))


def bias_of(program: Program, op: Linear) -> F32:
    """The bias of a linear as `fill` made it."""
    index, param = next((i, p) for i, p in enumerate(program.params) if p.name == op.bias)
    draws = [np.random.default_rng(index).standard_normal(part.shape) for part in param.parts]
    return np.concatenate(draws).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_come_back_as_their_values(name: str, isa: str) -> None:
    """Every number of a packed embedding, read by the embed op, equals its definition bit for bit."""
    program = program_of(FORMATS[name])
    executor, arrays = native(program, isa)
    executor.stop_after(0)
    n = one_token_rows(arrays, np.arange(VOCAB))
    executor.run(n, n, 0)
    head = next(i for i, p in enumerate(program.params) if p.name == "head")
    assert np.array_equal(executor.read("residual", n), values_of(program.params[head], head))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    "name", ["q4_0", "bf16", "gptq", "gptq2", "sym2", "sym3", "q8_0", "q6_k", "int8", "int8-64", "int8-32"]
)
def test_rounding_equals_its_definition(name: str, dtype: str, isa: str) -> None:
    """Floats rounded natively give the very codes and scales of quant.groups.quantize: outliers, zeros, tiny groups."""
    form = FORMATS[name]
    program = program_of(form)
    executor, arrays = native(program, isa)
    random = np.random.default_rng(3)
    w = random.standard_normal((VOCAB, program.param("head").cols)).astype(np.float32)
    w *= np.float32(10.0) ** random.integers(-7, 3, (VOCAB, 1)).astype(np.float32)
    w[random.random(w.shape) < 0.01] *= 30
    w[5], w[6, 40:] = 0, 0
    with np.errstate(over="ignore"):
        raw = w.astype(np.float16) if dtype == "F16" else w
    raw = (w.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else raw
    exact = (raw.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else raw.astype(np.float32)
    param = program.param("head")
    executor.put(param, 0, raw, dtype)
    executor.stop_after(0)
    n = one_token_rows(arrays, np.arange(VOCAB))
    executor.run(n, n, 0)
    assert form.groups is not None
    bits = CODE_BITS[form.dtype]
    expected = dequantize(form.groups, bits, quantize(exact, form.groups, bits))
    assert np.array_equal(executor.read("residual", n), expected)


def steps_of(x: F32, size: int) -> tuple[F32, np.ndarray]:
    """Lowest scale [rows, 1] and bits [rows, groups] of inputs in groups, by the definition of Quantize."""
    padded = np.zeros((len(x), -(-x.shape[1] // size) * size), np.float32)
    padded[:, : x.shape[1]] = np.abs(x)
    groups, widest = padded.reshape(len(x), -1, size).max(2), padded.max(1, keepdims=True)
    bits = np.zeros(groups.shape, np.int64)
    for doublings in range(GROUP_BITS + 1):
        bits[groups * 2.0**doublings <= widest] = GROUP_BITS - doublings
    return widest / np.float32(127) / np.float32(2**GROUP_BITS), bits


def turned(x: F32, form: Groups) -> F32:
    """Inputs as they are rounded."""
    if not form.rotated:
        return x
    return (rotate(x.reshape(len(x), -1, form.size)) * input_share(form.size)).reshape(x.shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_products(name: str, isa: str) -> None:
    """A linear in float64 over the very bytes it was given; inputs within half a step of their group."""
    program = program_of(FORMATS[name])
    executor, arrays = native(program, isa)
    index, op = first_linear(program)
    where = next(i for i, p in enumerate(program.params) if p.name == op.weight)
    form = program.param(op.weight).groups
    assert form is not None
    weight = values_of(program.params[where], where).astype(np.float64)
    bias = bias_of(program, op)
    for rows in (1, 3, 7, 130):
        n = one_token_rows(arrays, np.random.default_rng(rows).integers(0, VOCAB, rows))
        executor.stop_after(index)
        executor.run(n, n, 0)
        inputs, found = executor.read(op.x, n).astype(np.float64), executor.read(op.out, n)
        expected = inputs @ weight.T + bias
        scale = np.abs(inputs) @ np.abs(weight).T + np.abs(bias)
        assert (np.abs(found - expected) <= 1e-5 * scale).all()
        executor.stop_after(index - 1)  # later ops reuse its memory
        executor.run(n, n, 0)
        hidden = executor.read("hidden", n)
        taken, given = (turned(x, form) for x in (hidden, executor.read(op.x, n)))
        lowest, bits = steps_of(taken, form.size)
        steps = np.repeat(np.ldexp(lowest, bits), form.size, 1)[:, : hidden.shape[1]]
        assert (np.abs(given - taken) <= 0.501 * steps).all()
        reference = quantize_rows(torch.from_numpy(hidden), form.size, rotated=form.rotated).numpy()
        assert np.array_equal(executor.read(op.x, n), reference)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_same_bits_for_any_number_of_rows(name: str, isa: str) -> None:
    """A token's row of a linear is the same from 1 to 512 rows, and on one, two or three threads."""
    program = program_of(FORMATS[name], dim=1100)  # three blocks of features
    index, op = first_linear(program)
    ids = np.random.default_rng(1).integers(0, VOCAB, 512)
    alone: dict[int, F32] = {}
    for threads in (1, 2, 3):
        executor, arrays = native(program, isa, threads)
        executor.stop_after(index)
        if threads == 1:
            for token in ids[:80]:
                executor.run(one_token_rows(arrays, np.array([token])), 1, 0)
                alone[int(token)] = executor.read(op.out, 1)[0]
        for rows in (2, 3, 4, 5, 6, 7, 13, 64, 120, 121, 512)[:: 1 if threads == 2 else 3]:
            n = one_token_rows(arrays, np.resize(ids[:80], rows))
            executor.run(n, n, 0)
            found = executor.read(op.out, n)
            expected = np.array([alone[int(token)] for token in np.resize(ids[:80], rows)])
            assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), (threads, rows)


@pytest.mark.parametrize("isa", ISAS)
def test_largest_sums_of_a_group(isa: str) -> None:
    """The largest codes times the largest inputs of 128 features: the same bits in tiles and alone."""
    program = program_of(FORMATS["gptq8"], dim=256)
    executor, arrays = native(program, isa)
    for where, param in enumerate(program.params):
        if param.groups is None:
            for part in param.parts:
                executor.put(param, 0, np.ones(part.shape, np.float32), "F32")
            continue
        given = codes_of(param, where)
        assert given.offsets is not None
        scales, offsets = given.scales * 0 + np.float16(0.01), given.offsets * 0
        executor.put_codes(param, 0, GroupCodes(given.codes | 255, scales, offsets, None))
    index, op = first_linear(program)
    executor.stop_after(index)
    executor.run(one_token_rows(arrays, np.array([3])), 1, 0)
    alone = executor.read(op.out, 1)
    assert len(set(executor.read(op.x, 1).ravel())) == 1
    for rows in (3, 4, 5, 6):
        executor.run(one_token_rows(arrays, np.full(rows, 3)), rows, 0)
        assert np.array_equal(executor.read(op.out, rows), np.repeat(alone, rows, 0))


@pytest.mark.skipif(len(ISAS) < 2, reason="needs fused multiply-add")
def test_groups_are_added_in_rising_order() -> None:
    """The stated order, followed in numpy, gives the kernel's bits; the opposite order (negative control) does not."""
    program = program_of(FORMATS["q4_0"], dim=1100)
    executor, arrays = native(program, "")
    index, op = first_linear(program)
    executor.stop_after(index)
    executor.run(one_token_rows(arrays, np.array([3])), 1, 0)
    found, inputs = executor.read(op.out, 1)[0], executor.read(op.x, 1)[0]
    executor.stop_after(index - 1)
    executor.run(1, 1, 0)
    lowest, bits = steps_of(executor.read("hidden", 1), 32)
    assert len(set(bits[0])) > 1
    whole_x = np.append(inputs, np.zeros(20)).reshape(35, 32) / lowest.astype(np.float64)
    x = np.ldexp(np.rint(np.ldexp(whole_x, -bits[0][:, None])), bits[0][:, None])
    where = next(i for i, p in enumerate(program.params) if p.name == op.weight)
    given = codes_of(program.params[where], where)
    codes = np.pad(given.codes, ((0, 0), (0, 20))).reshape(-1, 35, 32).astype(np.float64) - 8
    whole = np.einsum("ogk,gk->go", codes, x).astype(np.float32)
    bias = bias_of(program, op)

    def added(order: range) -> F32:
        y = np.zeros(len(found), np.float32)
        for g in order:
            y = (given.scales[:, g].astype(np.float64) * whole[g] + y).astype(
                np.float32
            )  # fused: rounded once
        return y * lowest[0] + bias

    assert (added(range(35)) == found).mean() > 0.99
    backward = added(range(34, -1, -1))
    assert (backward == found).mean() < 0.9
    assert np.allclose(backward, found, rtol=1e-3, atol=1e-3)


def test_one_wrong_code_is_found() -> None:
    """Negative control: one nibble of 21,600 is another, and the layer's output differs from torch's there alone."""
    program = program_of(FORMATS["gptq"])
    wrong, reference = NativeExecutor(program, threads=1), TorchExecutor(program)
    fill(program, wrong, reference)
    index, op = first_linear(program)
    where = next(i for i, p in enumerate(program.params) if p.name == op.weight)
    given = codes_of(program.params[where], where)
    given.codes[77, 200] ^= 1
    wrong.put_codes(program.params[where], 0, given)
    stepper = Stepper(program, replace(LIMITS, max_tokens=8, max_rows=2))
    for executor in (wrong, reference):
        executor.bind(replace(LIMITS, max_tokens=8, max_rows=2), stepper.arrays)
        executor.stop_after(index)
    size = stepper.fill({stepper.add([1, 2, 3, 4]): 4})
    for executor in (wrong, reference):
        executor.run(size.num_tokens, size.num_rows, 0)
    far = np.abs(wrong.read(op.out, 4) - reference.read(op.out, 4)).max(0)
    assert np.argmax(far) == 77
    assert far[77] > 100 * np.delete(far, 77).max()


def test_refusals() -> None:
    program = program_of(FORMATS["q4_0"])
    executor = NativeExecutor(program, threads=1)
    param = program.param("head")
    given = codes_of(param, 0)
    with pytest.raises(ValueError, match="head: scales are float32"):
        executor.put_codes(param, 0, replace(given, scales=given.scales.astype(np.float32)))
    with pytest.raises(ValueError, match="rows 1:151 of 150"):
        executor.put_codes(param, 1, given)
    two_level = program_of(FORMATS["q4_k"])
    other = NativeExecutor(two_level, threads=1)
    with pytest.raises(ValueError, match="not rounded"):
        other.put(two_level.param("head"), 0, np.zeros((VOCAB, 300), np.float32), "F32")
