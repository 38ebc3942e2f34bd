"""Executors compared buffer by buffer after every op, and the comparison itself."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.backends import NATIVE, TORCH
from helpers.checkpoints import LENGTH, TINY_MODELS, TinyModel, random_tokens, tiny_model
from helpers.golden import MakeGolden
from helpers.specs import BF16, F32, I8, decoder_spec
from helpers.stepper import Stepper, StepSize, compare_buffers, first_difference
from quire.executor.base import Executor, Limits
from quire.executor.native import NativeExecutor
from quire.executor.torch import TorchExecutor
from quire.loader import Checkpoint, LoadRules, load
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.op import writes
from quire.spec.facts import read_model

INT8 = NumberFormats("f32", "f32", linears=I8, head=I8)

LIMITS = Limits(max_tokens=64, max_rows=4, max_logit_rows=4, max_len=LENGTH, num_blocks=40)


def mixed_step(a: Executor, b: Executor) -> StepSize:
    """Bind both to one set of arrays, run a first step, fill a second: chunk, decode and fresh prompt."""
    stepper = Stepper(a.program, LIMITS, seed=2)
    for executor in (a, b):
        executor.bind(LIMITS, stepper.arrays)
    first, second, third = (stepper.add(random_tokens(seed)) for seed in range(3))
    size = stepper.fill({first: 19, second: 33})
    for executor in (a, b):
        executor.run(size.num_tokens, size.num_rows, size.num_logit_rows)
    return stepper.fill({first: 1, second: 12, third: 21})


@pytest.mark.parametrize(("formats", "tolerance"), [(F32, 5e-6), (BF16, 0.03)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_native_equals_torch(
    model: TinyModel, formats: NumberFormats, tolerance: float, golden: MakeGolden
) -> None:
    """In bfloat16 sums that fall between two values round either way, and attention may round queries and
    probabilities to the cache's dtype: relative steps of 2^-8 that grow from layer to layer."""
    folder = golden(model).folder
    torch_executor, native = TORCH.load(folder, formats), NATIVE.load(folder, formats)
    found = compare_buffers(torch_executor, native, mixed_step(torch_executor, native))
    assert len(found) == sum(len(writes(op)) for op in native.program.ops)
    if (
        formats is BF16
    ):  # after a rounding a token may go to other experts: tests/native/test_experts.py goes on
        end = next((d.op_index for d in found if d.op == "Route"), len(native.program.ops))
        found = [d for d in found if d.op_index < end]
    assert first_difference(found, tolerance) is None


def filled(program_seed: int, wrong: str | None = None) -> TorchExecutor:
    """A torch executor with random weights; one element of parameter `wrong` is off."""
    spec = decoder_spec(128, 48, 40, (4, 2, 16), [0, 8], bias=True, qk_norm=True)
    executor = TorchExecutor(lower(spec, F32))
    random = np.random.default_rng(program_seed)
    for param in executor.program.params:
        shape = (param.rows,) if param.kind == "vector" else (param.rows, param.cols)
        data = (random.standard_normal(shape) * 0.2).astype(np.float32)
        if param.name == wrong:
            data.flat[data.size // 2] += 0.5
        executor.put(param, 0, data, "F32")
    return executor


@pytest.mark.parametrize(
    ("wrong", "op", "buffer"),
    [
        ("layers.0.qkv", "Linear", "qkv"),
        ("layers.1.q_norm", "RopeWrite", "qkv"),
        ("layers.0.o.bias", "Linear", "delta"),
        ("layers.1.down", "Linear", "delta"),
        ("layers.1.mlp_norm", "Norm", "hidden"),
        ("final_norm", "Norm", "last_hidden"),
        ("head", "Linear", "logits"),
    ],
)
def test_comparison_names_the_first_op_that_differs(wrong: str, op: str, buffer: str) -> None:
    a, b = filled(3), filled(3, wrong)
    first = first_difference(compare_buffers(a, b, mixed_step(a, b)), 1e-5)
    assert first is not None
    assert (first.op, first.buffer) == (op, buffer)
    guilty = a.program.ops[first.op_index]
    assert wrong in {getattr(guilty, field, None) for field in ("weight", "bias", "q_norm", "k_norm")}


def test_a_wrong_key_norm_shows_in_attention() -> None:
    """Keys live in the cache, not in a buffer: the first buffer to differ is attention's output."""
    a, b = filled(3), filled(3, "layers.0.k_norm")
    first = first_difference(compare_buffers(a, b, mixed_step(a, b)), 1e-5)
    assert first is not None
    assert (first.op, first.op_index) == ("Attend", 4)


def test_equal_executors_do_not_differ() -> None:
    a, b = filled(4), filled(4)
    assert max(d.max_abs for d in compare_buffers(a, b, mixed_step(a, b))) == 0.0


def int8_tolerance(folder: Path) -> float:
    """How far two executors may be apart, relative and root mean square, when linears are int8.

    Sums that differ in the last bits can fall to either side of a rounding, so at worst every input of a linear is
    rounded independently in both: a uniform error of one step, max|x| / 127, has the variance step² / 12 in each. Rows
    of this width reach about three times their root mean square. Errors of one linear after another add up as squares,
    and norms, soft caps and attention are allowed to double them.
    """
    linears = sum(
        p.format.quantized for p in lower(read_model(folder).spec, INT8).params if p.kind == "linear"
    )
    return 2 * math.sqrt(linears * 2 / 12) * 3 / 127


@pytest.mark.parametrize(
    "name", ["gemma2", "olmo2", "glm4", "granite", "stablelm-parallel-head-norms", "cohere2"]
)
def test_native_equals_torch_in_int8(name: str, golden: MakeGolden) -> None:
    """Sandwich norms, post-norms, branches side by side and multipliers before linears of whole numbers."""
    folder = golden(tiny_model(name)).folder
    torch_executor, native = TORCH.load(folder, INT8), NATIVE.load(folder, INT8)
    found = compare_buffers(torch_executor, native, mixed_step(torch_executor, native))
    assert first_difference(found, int8_tolerance(folder)) is None
    assert found[1].relative < 1e-6  # before anything was rounded they are equal


def test_a_wrong_scale_is_more_than_int8_rounds(golden: MakeGolden) -> None:
    """Negative control: a branch scaled by 0.9 is no rounding."""
    folder = golden(tiny_model("granite")).folder
    spec = read_model(folder).spec
    right, wrong = (
        NativeExecutor(lower(s, INT8), threads=2)
        for s in (spec, replace(spec, residual_scale=0.9 * spec.residual_scale))
    )
    for executor in (right, wrong):
        with Checkpoint(folder) as source:
            load(executor.program.params, source, executor, rules=LoadRules.of(spec))
    found = compare_buffers(right, wrong, mixed_step(right, wrong))
    assert first_difference(found, int8_tolerance(folder)) is not None
