"""Every op of the native executor against its torch definition, on every instruction set of this machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.pairs import pairwise
from helpers.stepper import Stepper, StepSize, compare_buffers
from quire import _native
from quire.executor.base import F32, Executor, Limits
from quire.executor.native import NativeExecutor
from quire.executor.torch import TorchExecutor
from quire.program.formats import I8, DType, Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.ops.linear import Linear
from quire.program.program import Program
from quire.spec import MLP, Attention, LatentAttention, Layer, ModelSpec, Norm, QKNorm, Rope

ISAS = _native.supported_isas()
FORMATS = {
    "f32": NumberFormats("f32", "f32"),
    "bf16": NumberFormats("bf16", "bf16"),
    "bf16-f32": NumberFormats("bf16", "f32"),
    "f32-bf16": NumberFormats("f32", "bf16"),
    "f16": NumberFormats("f16", "f16"),
    "f16-f32": NumberFormats("f16", "f32"),
    "i8-f32": NumberFormats("f32", "f32", I8, I8),
    "i8-bf16": NumberFormats("bf16", "bf16", I8),
    "i4-f32": NumberFormats("f32", "f32", *[WeightFormat("i4", Groups(32))] * 2),
    "i4-bf16": NumberFormats("bf16", "bf16", WeightFormat("i4", Groups(64, "f16", "u8")), I8),
}
WHOLE = (64, 96, 128, 256)  # widths of heads that are rotated in registers
VOCAB = 150  # no multiple of a vector or a panel
LIMITS = Limits(max_tokens=96, max_rows=5, max_logit_rows=40, max_len=2304, num_blocks=400)


def shape(name: str) -> ModelSpec:
    """Shapes that leave partial vectors, partial panels, partial rotations and every ratio of heads."""
    variants = {
        "gqa": {"heads": 4, "kv_heads": 2, "head_dim": 16, "dim": 48, "width": 72, "qkv_bias": True, "out_bias": True},
        "odd": {"heads": 6, "kv_heads": 2, "head_dim": 24, "dim": 56, "width": 40, "window": 20},
        "wide": {"heads": 2, "kv_heads": 2, "head_dim": 128, "dim": 130, "width": 66, "rotary": 32},
        "mqa": {"heads": 5, "kv_heads": 1, "head_dim": 80, "dim": 32, "width": 1100},
        **{f"d{d}": {"heads": 2, "kv_heads": 1, "head_dim": d, "dim": 32, "width": 40} for d in WHOLE},
    }  # fmt: skip
    v = dict(variants[name])
    if name in {"odd", "mqa", "d64", "d96", "d128"}:
        v["qk_norm"] = QKNorm(Norm(eps=1e-5))  # type: ignore[assignment]
    act = {"odd": "gelu", "wide": "gelu_tanh"}.get(name, "silu")
    rope = Rope(10_000.0, int(v.pop("rotary", v["head_dim"])))
    dim, width = int(v.pop("dim")), int(v.pop("width"))
    attention = Attention(rope=rope, scale=float(v["head_dim"]) ** -0.5, **v)  # type: ignore[arg-type]
    layers = tuple(Layer(attention, MLP(width, act, bias=name == "gqa")) for _ in range(2))  # type: ignore[arg-type]
    return ModelSpec(VOCAB, dim, layers, norm=Norm(eps=1e-5), max_positions=4096, tied=name != "wide")


def other_blocks(name: str) -> ModelSpec:
    """Blocks of other orders: norms, branches, multipliers and rotations that `shape` has not."""
    layer, rope = Norm("layer", 1e-5, bias=True), Rope(10_000.0, 22, interleaved=True)
    if name.startswith("latent"):
        return latent_blocks(256 if name == "latent" else 0)
    heads = {"heads": 6, "kv_heads": 3, "head_dim": 40, "scale": 0.15}
    attention = {
        "parallel": Attention(rope=rope, qk_norm=QKNorm(Norm("layer"), shared=False), **heads),  # type: ignore[arg-type]
        "sandwich": Attention(rope=None, qk_norm=QKNorm(Norm(), shared=False), window=20, **heads),  # type: ignore[arg-type]
        "post": Attention(rope=replace(rope, dim=40), qk_norm=QKNorm(Norm(), whole=True), **heads),  # type: ignore[arg-type]
    }[name]
    block = Layer(
        attention, MLP(50), pre_norm=name != "post", post_norm=name != "parallel", parallel=name == "parallel"
    )
    return ModelSpec(
        VOCAB, 1050, (block, block), layer if name == "parallel" else Norm(), max_positions=4096,
        embed_scale=5.0, residual_scale=0.3 if name == "sandwich" else 1.0, logits_scale=0.5,
        logits_cap=3.0 if name == "post" else 0.0,
    )  # fmt: skip


def latent_blocks(q_rank: int) -> ModelSpec:
    """Latent attention: more heads than rows of a call, widths that are no whole vectors; few heads, two panels."""
    sizes = (60, q_rank, 40, 10, 6, 12) if q_rank else (3, 0, 80, 34, 16, 70)
    rope = Rope(10_000.0, sizes[4], interleaved=q_rank > 0)
    attention = LatentAttention(*sizes, rope, 0.3, Norm(eps=1e-6), bias=q_rank > 0)
    block = Layer(attention, MLP(50))
    return ModelSpec(VOCAB, 96, (block, block), Norm(), max_positions=4096)


SHAPES = ["gqa", "odd", "wide", "mqa"]
BLOCKS = ["parallel", "sandwich", "post", "latent", "latent-lite"]


def random_part(program: Program, name: str, rows: int, cols: int, seed: int) -> F32:
    kind = program.param(name).kind
    noise = np.random.default_rng(seed).standard_normal((rows, cols) if cols else rows).astype(np.float32)
    if kind == "vector":
        return noise * np.float32(0.3) + np.float32("norm" in name)
    return noise / np.float32(np.sqrt(cols)) if name != "head" else noise / np.float32(4)


def parts_of(program: Program, name: str) -> Iterator[F32]:
    """The parts of a parameter as `fill` made them."""
    seeds = itertools.count()
    for param in program.params:
        for part in param.parts:
            seed = next(seeds)
            if param.name == name:
                yield random_part(program, name, part.rows, part.cols, seed)


def fill(program: Program, executors: list[Executor], dtype: str = "F32") -> None:
    for param in program.params:
        offset = 0
        for part, data in zip(param.parts, parts_of(program, param.name), strict=True):
            if dtype == "F16":
                raw = data.astype(np.float16)
            elif dtype == "BF16":
                raw = (data.view(np.uint32) >> 16).astype(np.uint16)
            else:
                raw = data
            for executor in executors:
                executor.put(param, offset, raw, dtype)
            offset += part.rows


def pair(
    name: str, formats: str, isa: str, threads: int = 2, *, fused: bool = True
) -> tuple[Executor, Executor, Stepper]:
    program = lower(other_blocks(name) if name in BLOCKS else shape(name), FORMATS[formats], fused=fused)
    native: Executor = NativeExecutor(program, threads=threads, isa=isa)
    reference: Executor = TorchExecutor(program)
    fill(program, [native, reference])
    stepper = Stepper(program, LIMITS)
    native.bind(LIMITS, stepper.arrays)
    reference.bind(LIMITS, stepper.arrays)
    return native, reference, stepper


def start(stepper: Stepper) -> tuple[int, int, int]:
    random = np.random.default_rng(5)
    a, b, c = (stepper.add(random.integers(0, VOCAB, 2300).tolist()) for _ in range(3))
    return a, b, c


@pytest.mark.parametrize(
    ("name", "formats", "isa"),
    [
        *pairwise([*SHAPES], [*FORMATS], ISAS),
        *pairwise([*BLOCKS], ["f32", "bf16", "f16"], ISAS),
        *itertools.product((f"d{d}" for d in WHOLE), ["f32"], ISAS),
    ],
)
def test_buffers(name: str, formats: str, isa: str) -> None:
    """After every op, every buffer agrees: float32 to 5e-5, others to a few of their roundings."""
    native, reference, stepper = pair(name, formats, isa)
    a, b, c = start(stepper)
    typical, largest = (5e-6, 5e-5) if formats in {"f32", "f16-f32"} else (2e-2, 2e-1)
    if formats == "f16":
        typical, largest = 3e-4, 3e-3
    if formats.startswith("i"):  # an input that lies between two steps may be rounded either way
        typical, largest = 5e-2, 5e-1
    for counts in ({a: 33, b: 17}, {a: 1, b: 31, c: 5}, {a: 1, b: 1, c: 1}):
        size = stepper.fill(counts)
        for difference in compare_buffers(native, reference, size):
            assert difference.rms <= typical * max(difference.scale, 1.0), difference
            assert difference.max_abs <= largest * max(difference.scale, 1.0), difference


@pytest.mark.parametrize("isa", ISAS)
def test_long_context(isa: str) -> None:
    """Several partitions of the KV axis, with decode and a chunk that crosses a partition's edge."""
    native, reference, stepper = pair("gqa", "f32", isa)
    a, b, _ = start(stepper)
    for _ in range(21):
        size = stepper.fill({a: 96})
        native.run(size.num_tokens, size.num_rows, 0)
        reference.run(size.num_tokens, size.num_rows, 0)
    for counts in ({a: 60, b: 30}, {a: 1, b: 1}):
        size = stepper.fill(counts)
        logits = native.run(size.num_tokens, size.num_rows, size.num_logit_rows)["logits"]
        expected = reference.run(size.num_tokens, size.num_rows, size.num_logit_rows)["logits"]
        assert np.abs(logits - expected).max() < 1e-4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("weights", ["f32", "bf16", "f16"])
def test_stored_formats(weights: DType, dtype: str, isa: str) -> None:
    """Half-precision checkpoints are widened exactly, or rounded once to bf16 or f16 as torch rounds."""
    program = lower(shape("wide"), NumberFormats(weights, "f32"))
    native, reference = NativeExecutor(program, threads=2, isa=isa), TorchExecutor(program)
    fill(program, [native, reference], dtype)
    stepper = Stepper(program, LIMITS)
    native.bind(LIMITS, stepper.arrays)
    reference.bind(LIMITS, stepper.arrays)
    size = stepper.fill({start(stepper)[0]: 3})
    for executor in (native, reference):
        executor.stop_after(0)
        executor.run(size.num_tokens, size.num_rows, 0)
    assert np.array_equal(native.read("residual", 3), reference.read("residual", 3))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_int8_products_are_exact(name: str, isa: str) -> None:
    """The first linear of a layer against whole-number arithmetic on the very bytes it was given."""
    native, _, stepper = pair(name, "i8-f32", isa, fused=False)
    program = native.program
    index = next(i for i, op in enumerate(program.ops) if isinstance(op, Linear))
    op = program.ops[index]
    assert isinstance(op, Linear)
    size = stepper.fill({start(stepper)[0]: 11})
    native.stop_after(index)
    native.run(size.num_tokens, size.num_rows, 0)
    inputs = native.read(op.x, 11).astype(np.float64)
    weight = np.concatenate(list(parts_of(program, op.weight))).astype(np.float32)
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
    rounded = np.round(weight * (np.float32(1) / scale)).astype(np.float64) * scale
    expected = inputs @ rounded.T
    if op.bias:
        expected += np.concatenate(list(parts_of(program, op.bias)))
    assert np.abs(native.read(op.out, 11) - expected).max() < 2e-6 * np.abs(expected).max()
    native.stop_after(index - 1)  # later ops reuse its memory
    native.run(size.num_tokens, size.num_rows, 0)
    hidden = native.read("hidden", 11)
    assert np.abs(inputs - hidden).max() <= np.abs(hidden).max(1).max() / 127 * 0.501


def steps_of(stepper: Stepper, executor: Executor, plan: list[dict[int, int]]) -> dict[int, F32]:
    found: dict[int, list[F32]] = {}
    for counts in plan:
        for number, logits in stepper.step(executor, counts).items():
            found.setdefault(number, []).append(logits)
    return {number: np.concatenate(parts) for number, parts in found.items()}


def bound(name: str, formats: str, isa: str, threads: int, seed: int) -> tuple[Executor, Stepper]:
    program = lower(other_blocks(name) if name in BLOCKS else shape(name), FORMATS[formats])
    executor = NativeExecutor(program, threads=threads, isa=isa)
    fill(program, [executor])
    stepper = Stepper(program, LIMITS, seed)
    executor.bind(LIMITS, stepper.arrays)
    return executor, stepper


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(SHAPES + BLOCKS),
    formats=st.sampled_from(list(FORMATS)),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_same_bits_in_any_step(
    name: str, formats: str, isa: str, threads: int, seed: int, data: st.DataObject
) -> None:
    """All logits of two sequences, alone and whole on one thread, then cut and mixed at random."""
    alone, stepper = bound(name, formats, isa, 1, 0)
    a, b, _ = start(stepper)
    whole = steps_of(stepper, alone, [{a: 80}, {b: 70}])
    mixed, stepper = bound(name, formats, isa, threads, seed)
    a, b, c = start(stepper)
    left = {a: 80, b: 70, c: 60}
    plan = []
    while any(left.values()):
        counts = {s: data.draw(st.integers(0, min(n, 30)), label="chunk") for s, n in left.items()}
        counts = {s: n for s, n in counts.items() if n} or {s: 1 for s, n in left.items() if n}
        plan.append(counts)
        left = {s: n - counts.get(s, 0) for s, n in left.items()}
    found = steps_of(stepper, mixed, plan)
    assert np.array_equal(found[a].view(np.uint32), whole[a].view(np.uint32))
    assert np.array_equal(found[b].view(np.uint32), whole[b].view(np.uint32))


def test_one_flipped_weight_is_found() -> None:
    """Negative control: the comparison names the op whose weight differs."""
    native, reference, stepper = pair("gqa", "f32", "")
    program = native.program
    wrong = NativeExecutor(program, threads=1)
    fill(program, [wrong])
    param = program.param("layers.1.gate_up")
    part = param.parts[0]
    wrong.put(param, 0, np.zeros((part.rows, part.cols), np.float32), "F32")
    wrong.bind(LIMITS, stepper.arrays)
    a, _, _ = start(stepper)
    size = stepper.fill({a: 10})
    worst = [d for d in compare_buffers(wrong, reference, size) if d.max_abs > 1e-3]
    first = program.ops[worst[0].op_index]
    assert getattr(first, "weight", None) == "layers.1.gate_up"


def test_poisoned_neighbours_leave_no_trace() -> None:
    """A sequence whose cache is all NaN does not affect others that share its tiles: they keep their bits."""
    executor, stepper = bound("odd", "bf16", "", 2, 3)
    a, b, _ = start(stepper)
    clean = steps_of(stepper, executor, [{a: 40}, {a: 30}])[a]
    poisoned, stepper = bound("odd", "bf16", "", 2, 3)
    core = poisoned.core  # type: ignore[attr-defined]
    core.fill_cache(float("nan"))
    a, b, _ = start(stepper)
    found = steps_of(stepper, poisoned, [{a: 40}, {a: 30, b: 5}])
    assert np.array_equal(found[a].view(np.uint32), clean.view(np.uint32))
    assert np.isfinite(found[b]).all()


def test_steps_beyond_the_limits_are_refused() -> None:
    executor, _ = bound("gqa", "f32", "", 1, 0)
    for step in (StepSize(97, 1, 1, {}), StepSize(1, 6, 1, {}), StepSize(1, 1, 41, {})):
        with pytest.raises(ValueError, match="limits"):
            executor.run(step.num_tokens, step.num_rows, step.num_logit_rows)


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="baseline"):
        NativeExecutor(lower(shape("gqa"), NumberFormats("f32", "f32")), threads=1, isa="sse9")
