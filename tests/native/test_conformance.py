"""Every kernel against the definition of its op, on every instruction set of this machine.

CASES says for each kernel by name what is run and compared; a kernel that has no case, or that its case does not call,
fails. The ops then go through more shapes and number formats. What single ops owe beside their definition (equal bits
whatever else runs, values that are not finite) is in the files beside this one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import page_sums
from helpers.attention import Latent, Shape, attend_index, random_tokens
from helpers.fours import drop_two
from helpers.group_codes import codes_of
from helpers.low_rank import fill_random, pooled, room
from helpers.pairs import pairwise
from helpers.specs import EXPERTS, I8, decoder_spec, moe_spec
from helpers.stepper import Stepper, StepSize, compare_buffers
from quire import _native
from quire.executor.base import F32, Executor, Limits
from quire.executor.native import NativeExecutor
from quire.executor.sampler import HostSampler
from quire.executor.torch import TorchExecutor
from quire.program.formats import DType, Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.ops.linear import MAXIMA_COLS
from quire.program.program import Program
from quire.spec import (
    MLP,
    AddedEmbedding,
    Attention,
    Dense,
    LatentAttention,
    Layer,
    ModelSpec,
    NormSpec,
    Pooling,
    QKNorm,
    Rope,
)
from quire.types import SamplingParams
from sampling.reference import acceptable, as_rows, ints, new_seq, position_logprobs

ISAS = _native.supported_isas()
FORMATS = {
    "f32": NumberFormats("f32", "f32"),
    "bf16": NumberFormats("bf16", "bf16"),
    "bf16-f32": NumberFormats("bf16", "f32"),
    "f32-bf16": NumberFormats("f32", "bf16"),
    "f16": NumberFormats("f16", "f16"),
    "f16-f32": NumberFormats("f16", "f32"),
    "bf16_24": NumberFormats("bf16", "bf16", WeightFormat("bf16_24")),
    "i8-f32": NumberFormats("f32", "f32", I8, I8),
    "i8-bf16": NumberFormats("bf16", "bf16", I8),
    "i4-f32": NumberFormats("f32", "f32", *[WeightFormat("i4", Groups(32))] * 2),
    "i2-f32": NumberFormats(
        "f32", "f32", WeightFormat("i2", Groups(32)), WeightFormat("i3", Groups(64, "f16", "u8"))
    ),
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
        v["qk_norm"] = QKNorm(NormSpec(eps=1e-5))  # type: ignore[assignment]
    act = {"odd": "gelu", "wide": "gelu_tanh"}.get(name, "silu")
    rope = Rope(10_000.0, int(v.pop("rotary", v["head_dim"])))
    dim, width = int(v.pop("dim")), int(v.pop("width"))
    attention = Attention(rope=rope, scale=float(v["head_dim"]) ** -0.5, **v)  # type: ignore[arg-type]
    layers = tuple(Layer(attention, MLP(width, act, bias=name == "gqa")) for _ in range(2))  # type: ignore[arg-type]
    return ModelSpec(VOCAB, dim, layers, norm=NormSpec(eps=1e-5), max_positions=4096, tied=name != "wide")


def other_blocks(name: str) -> ModelSpec:
    """Blocks of other orders: norms, branches, multipliers and rotations that `shape` has not."""
    layer, rope = NormSpec("layer", 1e-5, bias=True), Rope(10_000.0, 22, interleaved=True)
    if name.startswith("latent"):
        return latent_blocks(256 if name == "latent" else 0)
    heads = {"heads": 6, "kv_heads": 3, "head_dim": 40, "scale": 0.15}
    attention = {
        "parallel": Attention(rope=rope, qk_norm=QKNorm(NormSpec("layer"), shared=False), **heads),  # type: ignore[arg-type]
        "sandwich": Attention(rope=None, qk_norm=QKNorm(NormSpec(), shared=False), window=20, **heads),  # type: ignore[arg-type]
        "post": Attention(rope=replace(rope, dim=40), qk_norm=QKNorm(NormSpec(), whole=True), **heads),  # type: ignore[arg-type]
    }[name]
    block = Layer(
        attention, MLP(50), pre_norm=name != "post", post_norm=name != "parallel", parallel=name == "parallel"
    )
    return ModelSpec(
        VOCAB, 1050, (block, block), layer if name == "parallel" else NormSpec(), max_positions=4096,
        embed_scale=5.0, residual_scale=0.3 if name == "sandwich" else 1.0, logits_scale=0.5,
        logits_cap=3.0 if name == "post" else 0.0,
    )  # fmt: skip


def latent_blocks(q_rank: int) -> ModelSpec:
    """Latent attention: more heads than rows of a call, widths that are no whole vectors; few heads, two panels."""
    sizes = (60, q_rank, 40, 10, 6, 12) if q_rank else (3, 0, 80, 34, 16, 70)
    rope = Rope(10_000.0, sizes[4], interleaved=q_rank > 0)
    attention = LatentAttention(*sizes, rope, 0.3, NormSpec(eps=1e-6), bias=q_rank > 0)
    block = Layer(attention, MLP(50))
    return ModelSpec(VOCAB, 96, (block, block), NormSpec(), max_positions=4096)


def encoder_blocks(name: str) -> ModelSpec:
    """Whole texts: norms of sums over three tables, or a window to each side, gated; all kinds of pooling and heads."""
    layer, learned = NormSpec("layer", 1e-5, bias=True), name == "learned"
    heads = {"heads": 3, "kv_heads": 3, "head_dim": 24, "scale": 0.2, "causal": False}
    rope = None if learned else Rope(10_000.0, 24)
    attention = Attention(rope=rope, window=0 if learned else 21, qkv_bias=learned, out_bias=learned, **heads)  # type: ignore[arg-type]
    mlp = MLP(70, "relu" if learned else "gelu", bias=learned, gated=not learned)
    block = Layer(attention, mlp, pre_norm=not learned, sum_norm=learned)
    head = (Dense("head", 72, 40, act="tanh", norm=NormSpec("layer")), Dense("labels", 40, 3))
    return ModelSpec(
        VOCAB, 72, (block, block), layer, max_positions=2000, embed_norm=True,
        added=AddedEmbedding(2001, 1, 2) if learned else None,
        pooling=Pooling("mean") if learned else Pooling("first", head),
    )  # fmt: skip


SHAPES = ["gqa", "odd", "wide", "mqa"]
BLOCKS = ["parallel", "sandwich", "post", "latent", "latent-lite"]


def random_part(program: Program, name: str, rows: int, cols: int, seed: int) -> F32:
    kind = program.param(name).kind
    noise = np.random.default_rng(seed).standard_normal((rows, cols) if cols else rows).astype(np.float32)
    if kind == "vector":
        return noise * np.float32(0.3) + np.float32("norm" in name)
    if program.param(name).dtype == "bf16_24":
        drop_two(noise, seed)
    return noise / np.float32(np.sqrt(cols)) if name != "head" else noise / np.float32(4)


def parts_of(program: Program, name: str) -> Iterator[F32]:
    """The parts of a parameter as `fill` made them."""
    seeds = itertools.count()
    for param in program.params:
        for part in param.parts:
            seed = next(seeds)
            if param.name == name:
                yield random_part(program, name, part.rows, part.cols, seed)


def fill(program: Program, executors: list[Executor], dtype: str = "F32", codes: bool = False) -> None:
    """The same random parameters in every executor; `codes`: weights in groups come in codes."""
    for seed, param in enumerate(program.params):
        if codes and param.groups is not None:
            for executor in executors:
                executor.put_codes(param, 0, codes_of(param, seed))
            continue
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


def program_of(name: str, formats: str) -> Program:
    return lower(other_blocks(name) if name in BLOCKS else shape(name), FORMATS[formats])


def pair(
    program: Program, isa: str, *, dtype: str = "F32", codes: bool = False, limits: Limits = LIMITS
) -> tuple[Executor, Executor, Stepper]:
    """A native executor and the definition, with equal parameters."""
    executors: list[Executor] = [NativeExecutor(program, threads=2, isa=isa), TorchExecutor(program)]
    fill(program, executors, dtype, codes)
    stepper = Stepper(program, limits)
    for executor in executors:
        executor.bind(limits, stepper.arrays)
    return executors[0], executors[1], stepper


def start(stepper: Stepper) -> tuple[int, int, int]:
    random = np.random.default_rng(5)
    a, b, c = (stepper.add(random.integers(0, VOCAB, 2300).tolist()) for _ in range(3))
    return a, b, c


def tolerance(formats: str) -> tuple[float, float]:
    """Typical and largest difference of a buffer: of float32, or a few roundings of another format."""
    if formats in {"f32", "f16-f32"}:
        return 5e-6, 5e-5
    if formats == "f16":
        return 3e-4, 3e-3
    # an input that lies between two steps may be rounded either way
    return (5e-2, 5e-1) if formats.startswith("i") else (2e-2, 2e-1)


def agree(native: Executor, reference: Executor, size: StepSize, formats: str) -> None:
    """After every op, every buffer of the two agrees."""
    typical, largest = tolerance(formats)
    for difference in compare_buffers(native, reference, size):
        assert difference.rms <= typical * max(difference.scale, 1.0), difference
        assert difference.max_abs <= largest * max(difference.scale, 1.0), difference


# ---- kernels ------------------------------------------------------------------------------------------------------


def ops(name: str, formats: str, isa: str, *, codes: bool = False) -> None:
    """Prompts in two chunks, then a step of decodes."""
    native, reference, stepper = pair(program_of(name, formats), isa, codes=codes)
    a, b, c = start(stepper)
    for counts in ({a: 33, b: 17}, {a: 1, b: 31, c: 5}, {a: 1, b: 1, c: 1}):
        agree(native, reference, stepper.fill(counts), formats)


def encoders(name: str, formats: str, isa: str, lengths: tuple[int, ...] = (45, 1, 17)) -> None:
    """Whole texts of several lengths in a step."""
    limits = replace(LIMITS, max_tokens=sum(lengths))
    native, reference, stepper = pair(lower(encoder_blocks(name), FORMATS[formats]), isa, limits=limits)
    ids = VOCAB * (2 if name == "learned" else 1)
    texts = [np.random.default_rng(length).integers(0, ids, length).tolist() for length in lengths]
    agree(native, reference, stepper.fill({stepper.add(text): len(text) for text in texts}), formats)


def low_rank(isa: str) -> None:
    """A linear of three parts and one with an activation inside, for rows that all have an adapter."""
    program = lower(decoder_spec(VOCAB, 64, 128, (2, 1, 20), [0]), FORMATS["f32"], lora=room(16))
    native, reference, stepper = pair(program, isa, limits=pooled(replace(LIMITS, max_loras=1), program))
    for executor in (native, reference):
        fill_random(executor, 0, 1, 16)
    sequence = start(stepper)[0]
    stepper.arrays.adapters[:] = 0
    for count in (33, 1):
        agree(native, reference, stepper.fill({sequence: count}), "f32")


def experts(isa: str) -> None:
    moe = EXPERTS[1]
    spec = moe_spec(moe.router, moe.width, dim=56, layers=1, shared=moe.shared)
    native, reference, stepper = pair(lower(spec, FORMATS["f32"]), isa)
    tokens = np.random.default_rng(0).integers(0, spec.vocab, 40).tolist()
    agree(native, reference, stepper.fill({stepper.add(tokens): 40}), "f32")


def long_decode(one: Shape | Latent, isa: str) -> None:
    """Two partitions of the KV axis, on two threads."""
    limits = Limits(max_tokens=1100, max_rows=1, max_logit_rows=1, max_len=1200, num_blocks=80)
    native, reference, stepper = pair(one.program(FORMATS["f32"]), isa, limits=limits)
    sequence = stepper.add(random_tokens(0, 1101))
    for count in (1100, 1):
        size = stepper.fill({sequence: count})
        for executor in (native, reference):
            executor.run(count, 1, 0)
    agree(native, reference, size, "f32")


def rounded_tokens(isa: str) -> None:
    """A kivi cache, whose numbers between two steps may be rounded either way."""
    limits = Limits(max_tokens=200, max_rows=1, max_logit_rows=1, max_len=224, num_blocks=20, block_size=32)
    program = Shape(2, 1, 16).program(NumberFormats("f32", "kivi4"))
    native, reference, stepper = pair(program, isa, limits=limits)
    size = stepper.fill({stepper.add(random_tokens(0, 200)): 200})
    found = []
    for executor in (native, reference):
        executor.stop_after(attend_index(program))
        executor.run(size.num_tokens, size.num_rows, 0)
        found.append(executor.read("mixed", 200))
    assert np.abs(found[0] - found[1]).max() < 0.05 * np.abs(found[1]).max()


def stored(weights: DType, dtype: str, isa: str) -> None:
    """Half-precision checkpoints are widened exactly, or rounded once to bf16 or f16 as torch rounds."""
    program = lower(shape("wide"), NumberFormats(weights, "f32"))
    native, reference, stepper = pair(program, isa, dtype=dtype)
    size = stepper.fill({start(stepper)[0]: 3})
    for executor in (native, reference):
        executor.stop_after(0)
        executor.run(size.num_tokens, size.num_rows, 0)
    assert np.array_equal(native.read("residual", 3), reference.read("residual", 3))


def not_finite(isa: str) -> None:
    program = program_of("gqa", "f32")
    executor, param = NativeExecutor(program, threads=1, isa=isa), program.param("layers.0.down")
    data = np.ones(param.parts[0].shape, np.float32)
    assert executor.put_checked(param, 0, data, "F32") is None
    data[7, 30], data[9, 1] = np.inf, np.nan
    assert executor.put_checked(param, 0, data, "F32") == 7 * data.shape[1] + 30


def sampling(isa: str) -> None:
    """A token that the definition draws, with and without maxima, and its log-probabilities."""
    logits = np.random.default_rng(3).normal(0, 3, 3000).astype(np.float32)
    padded = np.pad(logits, (0, -3000 % MAXIMA_COLS), constant_values=-np.inf)
    maxima = as_rows(padded.reshape(-1, MAXIMA_COLS).max(1))
    for params in (
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(top_k=700, top_p=0.9, min_p=0.001, temperature=2.0),
        SamplingParams(allowed_token_ids=[5, 700, 2999]),
        SamplingParams(),
    ):
        new = new_seq(params, [1, 2, 3])
        for outputs in ({"logits": as_rows(logits)}, {"logits": as_rows(logits), "maxima": maxima}):
            sampler = HostSampler(3000, 1, isa)
            sampler.add(0, new)
            found = sampler.sample(outputs, ints(0), ints(3))
            token = int(found.token_ids[0])
            assert token in acceptable(logits, new, 3)
            if (table := found.logprobs[0]) is not None:
                expected = position_logprobs(logits, token, 3)
                assert [entry.token_id for entry in table[0]] == [entry.token_id for entry in expected]
                assert np.allclose(table.values, [entry.logprob for entry in expected], atol=1e-5)


def probes(isa: str) -> None:
    """What measures the machine; there is no definition of how fast it is."""
    core = _native.Executor(isa, 1)
    assert _native.BandwidthProbe(core, 2**20).measure() > 0
    for dtype in (_native.DType.f32, _native.DType.bf16, _native.DType.i8):
        assert _native.measure_flops(core, dtype, 1000) > 0


def summed_pages(isa: str) -> None:
    data = np.arange(5000, dtype=np.uint16).view(np.uint8)
    assert _native.sum_pages(data, page_sums.KEY, isa=isa) == page_sums.defined(data.tobytes())


# Names and formats of decoders that are cases of kernels.
DECODERS = [
    ("gqa", "f32"),
    ("gqa", "bf16"),
    ("gqa", "f16"),
    ("gqa", "bf16_24"),
    ("gqa", "i4-f32"),
    ("sandwich", "f32"),
    ("latent", "f32"),
]
F32_OPS, BF16_OPS, F16_OPS, FOURS_OPS, I4_OPS, SANDWICH, LATENT = (
    functools.partial(ops, *case) for case in DECODERS
)
CASES: dict[str, Callable[[str], None]] = {
    **dict.fromkeys(("linear_f32", "pack_f32", "norm", "rope_write", "attend", "gated_act"), F32_OPS),
    **dict.fromkeys(("embed", "gather", "maxima"), F32_OPS),
    **dict.fromkeys(("linear_bf16", "pack_bf16"), BF16_OPS),
    **dict.fromkeys(("linear_f16", "pack_f16"), F16_OPS),
    **dict.fromkeys(("linear_bf16_24", "pack_bf16_24"), FOURS_OPS),
    **dict.fromkeys(("linear_groups", "pack_groups", "quantize", "embed_groups"), I4_OPS),
    **dict.fromkeys(("add_rows", "scale_rows"), SANDWICH),
    **dict.fromkeys(("latent_write", "latent_attend"), LATENT),
    **dict.fromkeys(("embed_sum", "pool_rows"), functools.partial(encoders, "learned", "f32")),
    **dict.fromkeys(("route", "combine"), experts),
    **dict.fromkeys(("shrink", "expand"), low_rank),
    **dict.fromkeys(
        ("row_max", "row_max_of", "mask_row", "exp_row", "measure", "collect", "count_before"), sampling
    ),
    **dict.fromkeys(("race_bounds", "race_span", "race_list"), sampling),
    **dict.fromkeys(("read_sum", "fma_loop", "bf16_loop", "i8_loop"), probes),
    "compress_kv": rounded_tokens,
    "sum_pages": summed_pages,
    "pack_codes": functools.partial(ops, "gqa", "i4-f32", codes=True),
    "attend_merge": functools.partial(long_decode, Shape(2, 1, 16)),
    "latent_merge": functools.partial(long_decode, Latent(4, 32, 8)),
    "to_f32": functools.partial(stored, "f32", "F16"),
    "to_bf16": functools.partial(stored, "bf16", "F32"),
    "to_f16": functools.partial(stored, "f16", "F32"),
    "first_nonfinite": not_finite,
}
KERNELS = sorted(_native.take_kernel_calls())


def without_case(kernels: Iterable[str]) -> list[str]:
    return [kernel for kernel in kernels if kernel not in CASES]


def test_every_kernel_has_a_case() -> None:
    assert without_case(KERNELS) == []
    assert without_case([*KERNELS, "toy"]) == ["toy"]  # negative control
    assert CASES.keys() == set(KERNELS)


@functools.cache
def calls(case: Callable[[str], None], isa: str) -> dict[str, int]:
    """How often a case calls each kernel; it raises where it disagrees."""
    _native.take_kernel_calls()
    _native.count_kernels(True)
    try:
        case(isa)
    finally:
        _native.count_kernels(False)
    return dict(_native.take_kernel_calls())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel: str, isa: str) -> None:
    """The case of a kernel agrees with the definition, and calls the kernel."""
    assert calls(CASES[kernel], isa)[kernel] > 0


# ---- ops in more shapes and formats -------------------------------------------------------------------------------

MORE = [
    *pairwise([*SHAPES], [*FORMATS], ISAS),
    *pairwise([*BLOCKS], ["f32", "bf16", "f16"], ISAS),
    *itertools.product((f"d{d}" for d in WHOLE), ["f32"], ISAS),
]


@pytest.mark.parametrize(("name", "formats", "isa"), MORE)
def test_buffers(name: str, formats: str, isa: str) -> None:
    ops(name, formats, isa)


@pytest.mark.parametrize(
    ("name", "formats", "isa"), pairwise(["learned", "window"], ["f32", "bf16", "f16", "i8-bf16"], ISAS)
)
def test_buffers_of_encoders(name: str, formats: str, isa: str) -> None:
    encoders(name, formats, isa)


@pytest.mark.parametrize("name", ["learned", "window"])
def test_a_text_of_several_partitions(name: str) -> None:
    encoders(name, "f32", ISAS[0], (1300, 40))


@pytest.mark.parametrize("isa", ISAS)
def test_long_context(isa: str) -> None:
    """Several partitions of the KV axis, with decode and a chunk that crosses a partition's edge."""
    native, reference, stepper = pair(program_of("gqa", "f32"), isa)
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
    stored(weights, dtype, isa)


def steps_of(stepper: Stepper, executor: Executor, plan: list[dict[int, int]]) -> dict[int, F32]:
    found: dict[int, list[F32]] = {}
    for counts in plan:
        for number, logits in stepper.step(executor, counts).items():
            found.setdefault(number, []).append(logits)
    return {number: np.concatenate(parts) for number, parts in found.items()}


def bound(name: str, formats: str, isa: str, threads: int, seed: int) -> tuple[Executor, Stepper]:
    program = program_of(name, formats)
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
    native, reference, stepper = pair(program_of("gqa", "f32"), "")
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
    core.fill_cache(255)
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
