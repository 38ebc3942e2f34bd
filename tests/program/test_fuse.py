"""Fused programs: which ops are joined, which must stay, and that no bit changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from helpers.checkpoints import random_tokens
from helpers.specs import BF16, EXPERTS, I8, decoder_spec, moe_spec
from helpers.stepper import Stepper
from quire import _native
from quire.executor.base import F32, Limits
from quire.executor.native import NativeExecutor
from quire.loader import RandomWeights, load
from quire.program import memory
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.op import writes
from quire.program.ops.attention import Attend
from quire.program.ops.linear import Linear
from quire.program.ops.rows import Activate, GatedAct, Norm, Quantize
from quire.program.program import Program
from quire.spec import MLP, ModelSpec
from quire.spec.model import ClampedSwiGLU

LIMITS = Limits(max_tokens=256, max_rows=4, max_logit_rows=64, max_len=256, num_blocks=64)
INT4 = WeightFormat("i4", Groups(32))
SPEC = decoder_spec(128, 72, 100, (4, 2, 16), [0, 8], bias=True, qk_norm=True)
SANDWICH = replace(SPEC, layers=tuple(replace(layer, post_norm=True) for layer in SPEC.layers))
MOE = replace(moe_spec(EXPERTS[1].router, shared=EXPERTS[1].shared), vocab=128)
MIXED = {
    "layers.0.qkv.0": INT4,
    "layers.0.qkv.1": INT4,
    "layers.0.qkv.2": I8,
    "layers.1.o": WeightFormat("bf16"),
}
WIDE = decoder_spec(128, 72, 320, (4, 2, 16), [0], bias=True)  # halves of five panels
CLAMPED = replace(
    WIDE, layers=tuple(replace(x, mlp=MLP(320, ClampedSwiGLU(), bias=True)) for x in WIDE.layers)
)
PLAIN = replace(
    WIDE, layers=tuple(replace(x, mlp=MLP(320, "gelu", bias=True, gated=False)) for x in WIDE.layers)
)
CASES = {
    "plain": (PLAIN, BF16),
    "plain int8": (PLAIN, NumberFormats("bf16", "bf16", I8)),
    "gated": (WIDE, BF16),
    "gated int8": (WIDE, NumberFormats("bf16", "bf16", I8)),
    "gated int4": (CLAMPED, NumberFormats("f32", "f32", INT4)),
    "int8": (SPEC, NumberFormats("bf16", "bf16", I8, I8)),
    "int4": (SPEC, NumberFormats("bf16", "i8", INT4, I8)),
    "post-norms": (SANDWICH, NumberFormats("bf16", "f32", INT4)),
    "formats": (SPEC, NumberFormats("bf16", "bf16", INT4, I8, MIXED)),
    "experts": (
        replace(moe_spec(EXPERTS[1].router, shared=EXPERTS[1].shared), vocab=128),
        NumberFormats("bf16", "bf16", I8),
    ),
}


def kinds(program: Program) -> list[str]:
    return [type(op).__name__ for op in program.ops]


def test_a_quantized_dense_model_rounds_nothing_in_an_op_of_its_own() -> None:
    spec, formats = CASES["int8"]
    plain, fused = lower(spec, formats, fused=False), lower(spec, formats)
    assert kinds(plain).count("Quantize") == 4 * 2 + 1
    assert [kind for kind in kinds(plain) if kind != "Quantize"] == kinds(fused)
    for op in fused.ops:
        if isinstance(op, Norm | GatedAct | Attend):
            assert fused.buffer(op.out).dtype == "i8"
            assert not isinstance(op, Attend) or fused.buffer(op.wide or "").dtype == "f32"
    gone = {b.name for b in plain.buffers} - {b.name for b in fused.buffers}
    assert gone == {"hidden", "gated", "last_hidden"}
    assert memory.plan_arena(fused, 64, 4).total < memory.plan_arena(plain, 64, 4).total
    assert fused.params == plain.params


def test_a_gated_linear_has_halves_of_whole_panels() -> None:
    """Widths of 100 and 320 features; the activation of the first stays an op, and so does all of a float program."""
    assert lower(SPEC, BF16) == lower(SPEC, BF16, fused=False)
    for spec, formats in (CASES["gated"], CASES["gated int8"]):
        program = lower(spec, formats)
        assert not any(isinstance(op, GatedAct) for op in program.ops)
        (gated,) = (op for op in program.ops if isinstance(op, Linear) and op.act)
        assert (gated.out, gated.act) == ("gated", "silu")
        assert "gate_up" not in {buffer.name for buffer in program.buffers}


def test_a_plain_activation_is_part_of_its_linear() -> None:
    """Of five panels; not where the last panel is half."""
    for case in ("plain", "plain int8"):
        program = lower(*CASES[case])
        assert not any(isinstance(op, Activate) for op in program.ops)
        (activated,) = (op for op in program.ops if isinstance(op, Linear) and op.act)
        assert (activated.out, activated.act, activated.up) == ("gated", "gelu", False)
        assert "up" not in {buffer.name for buffer in program.buffers}
    narrow = replace(PLAIN, layers=tuple(replace(x, mlp=replace(x.mlp, width=300)) for x in PLAIN.layers))
    assert any(isinstance(op, Activate) for op in lower(narrow, BF16).ops)


def test_buffers_with_other_readers_stay() -> None:
    """Experts: the router reads the float32 rows that are rounded for the experts. Two formats: two roundings."""
    experts = lower(*CASES["experts"])
    assert any(op.x == "hidden" for op in experts.ops if isinstance(op, Quantize))
    formats = lower(*CASES["formats"])
    rounded = [op for op in formats.body if isinstance(op, Quantize)]
    assert len(rounded) == 2
    assert len({op.out for op in rounded}) == 2
    assert {op.x for op in rounded} == {"hidden"}


def test_ops_that_run_together_share_no_bytes() -> None:
    """What a fused op writes lies over nothing that it reads: rows are done by several threads at a time."""
    for spec, formats in CASES.values():
        program = lower(spec, formats)
        plan = memory.plan_arena(program, 64, 4)
        for op, live in zip(program.ops, memory.live_buffers(program), strict=True):
            assert set(writes(op)) <= live
            places = sorted(
                (plan.offsets[name], memory.buffer_bytes(program.buffer(name), 64, 4)) for name in live
            )
            for (begin, size), (after, _) in pairwise(places):
                assert begin + size <= after


def logits(
    spec: ModelSpec, formats: NumberFormats, *, fused: bool, isa: str = "", threads: int = 2
) -> list[F32]:
    """Logits of three steps: a long prompt, in several chunks of rows, and one of few rows; few rows; one row."""
    program = lower(spec, formats, fused=fused)
    executor = NativeExecutor(program, threads=threads, isa=isa)
    load(program.params, RandomWeights(program.params), executor)
    stepper = Stepper(program, LIMITS, seed=2)
    executor.bind(LIMITS, stepper.arrays)
    first, second = stepper.add(random_tokens(0, 240)), stepper.add(random_tokens(1, 240))
    found = [
        stepper.step(executor, counts)
        for counts in ({first: 190, second: 33}, {first: 1, second: 12}, {first: 1})
    ]
    executor.close()
    return [step[number] for step in found for number in sorted(step)]


@pytest.mark.parametrize("isa", _native.supported_isas())
@pytest.mark.parametrize("case", CASES)
def test_fusing_changes_no_bit(case: str, isa: str) -> None:
    plain = logits(*CASES[case], fused=False, isa=isa, threads=1)
    fused = logits(*CASES[case], fused=True, isa=isa, threads=3)
    for a, b in zip(plain, fused, strict=True):
        assert np.isfinite(a).all()
        assert np.array_equal(a, b)


def test_other_roundings_give_other_bits() -> None:
    """Negative control: what the comparison above would say if fusing rounded to other groups."""
    spec, formats = CASES["int4"]
    other = replace(formats, linears=WeightFormat("i4", Groups(64)))
    plain, changed = (logits(spec, each, fused=True) for each in (formats, other))
    assert not np.array_equal(plain[0], changed[0])


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_a_row_that_is_not_finite_is_not_rounded_to_numbers(isa: str) -> None:
    """What is wrong with a row reaches its output, in whichever column it is, and no other row."""
    program = lower(SPEC, NumberFormats("bf16", "bf16", I8), fused=False)
    executor = NativeExecutor(program, threads=1, isa=isa)
    load(program.params, RandomWeights(program.params), executor)
    stepper = Stepper(program, LIMITS)
    executor.bind(LIMITS, stepper.arrays)
    at = next(i for i, op in enumerate(program.ops) if isinstance(op, Quantize) and op.x == "mixed")
    size = stepper.fill({stepper.add(random_tokens(0)): 3})
    rows = executor._view("mixed", 3)
    for column in (0, 17, 63):
        for value in (np.nan, np.inf, -np.inf):
            rows[:] = 1.0
            rows[1, column] = value
            executor.run_range(size.num_tokens, size.num_rows, 0, at, at + 1)
            found = executor.read("mixed_bytes", 3)
            assert np.isnan(found[1]).all()
            assert np.allclose(found[[0, 2]], 1.0)
    executor.close()
