"""Attention of the native executor against its torch definition: shapes, windows, soft caps, sinks, cache formats."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from helpers.attention import Shape, pair, random_tokens
from quire import _native
from quire.cache_kinds import LATE_KV, KVType
from quire.executor.base import F32, Limits
from quire.program.lower import NumberFormats
from quire.reference.plain_attention import attention

ISAS = _native.supported_isas()
LIMITS = Limits(max_tokens=160, max_rows=4, max_logit_rows=4, max_len=1600, num_blocks=280)
SHAPES = [
    Shape(2, 2, 64),
    Shape(4, 1, 80, softcap=3.0),
    Shape(8, 1, 96, window=70, sinks=True),
    Shape(16, 1, 256, softcap=2.0, sinks=True),
    Shape(5, 5, 12, window=33, softcap=5.0),
    Shape(32, 2, 20, sinks=True),
]
KV = get_args(KVType)
# Of the largest output. Keys and values that lie between two steps may be stored either way.
TOLERANCE = {
    "f32": 3e-5, "bf16": 2e-2, "f16": 1e-3, "i8": 1e-2, "e4m3": 4e-2, "e5m2": 6e-2, "i4": 0.1,
    "kivi4": 0.1, "kivi2": 0.3, "kvquant3": 0.2,
}  # fmt: skip


def mixed(stepper_seed: int, shape: Shape, kv: KVType, isa: str) -> tuple[F32, F32]:
    """Outputs of attention in a step with a decode, a chunk and a fresh prompt: native, torch."""
    program = shape.program(NumberFormats("f32", kv))
    native, reference, stepper = pair(
        program, replace(LIMITS, block_size=32) if kv in LATE_KV else LIMITS, isa
    )
    first, second, third = (stepper.add(random_tokens(seed, 300)) for seed in range(3))
    for counts in ({first: 130}, {first: 20, second: 100}):
        size = stepper.fill(counts)
        for executor in (native, reference):
            executor.run(size.num_tokens, size.num_rows, 0)
    size = stepper.fill({first: 1, second: 61, third: 50})
    for executor in (native, reference):
        executor.run(size.num_tokens, size.num_rows, 0)
    left, right = (executor.read("mixed", size.num_tokens) for executor in (native, reference))
    return left, right


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_equals_torch(shape: Shape, kv: KVType, isa: str) -> None:
    found, expected = mixed(0, shape, kv, isa)
    assert np.abs(expected).max() > 0.1
    assert np.abs(found - expected).max() <= TOLERANCE[kv] * np.abs(expected).max()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Shape(4, 2, 32), Shape(4, 2, 32, softcap=4.0)),
        (Shape(4, 2, 32), Shape(4, 2, 32, sinks=True)),
        (Shape(4, 2, 32), Shape(4, 2, 32, window=90)),
        (Shape(4, 2, 32, softcap=4.0), Shape(4, 2, 32, softcap=4.1)),
    ],
    ids=str,
)
def test_each_fact_of_the_op_matters(one: Shape, other: Shape) -> None:
    """Negative control: the comparison above would see a soft cap, a sink or a window that is left out."""
    left, right = (mixed(0, shape, "f32", "")[0] for shape in (one, other))
    assert np.abs(left - right).max() > 20 * TOLERANCE["f32"] * np.abs(left).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 63, 200, 1100])
def test_tiles_of_any_size_have_the_same_bits_and_are_counted(isa: str, tokens: int) -> None:
    """The kernel counts what it reads: all keys and values once a call, in whole tiles of 16."""
    core, dim = _native.Executor(isa, 1), 40
    q, k, v = np.random.default_rng(tokens).standard_normal((3, tokens, dim), np.float32)
    outputs = []
    for rows in (1, 7, 48, 300):
        out = np.zeros((tokens, dim), np.float32)
        addresses = [each.ctypes.data for each in (q, k, v, out)]
        moved = _native.attend_tiles(core, *addresses, tokens, dim, rows)
        kept = -(-tokens // 16) * 16 * 48  # numbers of all keys, or values, as the cache has them
        assert moved == 2 * tokens * dim + -(-tokens // rows) * 2 * kept
        outputs.append(out)
    exact = attention(*(each.astype(np.float64) for each in (q, k, v)), causal=False)
    assert np.abs(outputs[0] - exact).max() < 1e-5
    assert all(np.array_equal(out, outputs[0]) for out in outputs)
