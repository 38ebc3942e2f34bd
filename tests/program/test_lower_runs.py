"""A linear whose sources have formats of their own: runs of equal ones, each into its columns."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.specs import F32, decoder_spec
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.memory import live_buffers
from quire.program.ops.linear import Linear

A, B = WeightFormat("i4", Groups(32)), WeightFormat("i8", Groups(16, "f32"))
SPEC = decoder_spec(128, 64, 96, (4, 2, 16), [0, 0], bias=True)


def qkv(*own: WeightFormat) -> list[Linear]:
    """The linears that fill q, k and v of layer 1."""
    params = {f"layers.1.qkv.{at}": form for at, form in enumerate(own)} | {"layers.1.qkv": own[0]}
    program = lower(SPEC, NumberFormats("f32", "f32", params=params))
    found = [op for op in program.ops if isinstance(op, Linear) and op.weight.startswith("layers.1.qkv")]
    formats = [program.param(op.weight).format for op in found]
    assert formats == [form for at, form in enumerate(own) if at == 0 or own[at - 1] != form]
    rows = [program.param(op.weight).rows for op in found]
    assert [op.first for op in found] == np.cumsum([0, *rows[:-1]]).tolist()
    assert sum(rows) == program.buffer(found[0].out).cols
    for op, live in zip(program.ops, live_buffers(program), strict=True):
        if isinstance(op, Linear) and op in found[1:]:
            assert op.out in live
    return found


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ((A, A, A), ["layers.1.qkv"]),
        ((A, A, B), ["layers.1.qkv.0", "layers.1.qkv.2"]),
        ((A, B, B), ["layers.1.qkv.0", "layers.1.qkv.1"]),
        ((A, B, A), ["layers.1.qkv.0", "layers.1.qkv.1", "layers.1.qkv.2"]),
    ],
)
def test_runs(own: tuple[WeightFormat, ...], names: list[str]) -> None:
    assert [op.weight for op in qkv(*own)] == names


def test_rows_filled_before_are_kept() -> None:
    """The memory plan must not give the first columns away before the last ones are there."""
    params = {"layers.0.qkv.0": A, "layers.0.qkv.1": A, "layers.0.qkv.2": B, "layers.0.qkv": A}
    program = lower(SPEC, NumberFormats("f32", "f32", params=params))
    first, second = (i for i, op in enumerate(program.ops) if isinstance(op, Linear) and "0.qkv" in op.weight)
    out = program.ops[first].out  # type: ignore[union-attr]
    assert all(out in live for live in live_buffers(program)[first : second + 1])


def test_without_formats_of_their_own_nothing_changes() -> None:
    assert [op.first for op in lower(SPEC, F32).ops if isinstance(op, Linear)] == [0] * 9
