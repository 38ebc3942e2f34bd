"""Outputs of a program: buffers that are the caller's when a step has run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from helpers.specs import F32, I8, decoder_spec
from quire.executor.base import Executor, Limits, StepArrays
from quire.executor.native import NativeExecutor
from quire.executor.torch import TorchExecutor
from quire.loader import RandomWeights, load
from quire.program.formats import NumberFormats
from quire.program.fuse import fuse
from quire.program.lower import lower
from quire.program.memory import live_buffers
from quire.program.program import Output, Program

LIMITS = Limits(max_tokens=8, max_rows=1, max_logit_rows=3, max_len=16, num_blocks=1)


def more_outputs() -> Program:
    """A program that also leaves the residual stream of its tokens and the normed rows before the logits."""
    program = lower(decoder_spec(70, 16, 24, (2, 1, 8), [0, 0]), F32)
    more = Output("residual", "residual"), Output("hidden", "last_hidden")
    return replace(program, outputs=(*program.outputs, *more))


@pytest.mark.parametrize(
    "make", [lambda p: NativeExecutor(p, threads=2), TorchExecutor], ids=["native", "torch"]
)
def test_a_step_leaves_every_output(make: Callable[[Program], Executor]) -> None:
    program = more_outputs()
    executor, arrays = make(program), StepArrays(LIMITS, 1)
    load(program.params, RandomWeights(program.params), executor)
    executor.bind(LIMITS, arrays)
    arrays.token_ids[:5], arrays.positions[:5], arrays.query_start[1] = range(5), range(5), 5
    arrays.logit_rows[:2] = 4, 1
    found = {name: rows.copy() for name, rows in executor.run(5, 1, 2).items()}
    assert {name: rows.shape for name, rows in found.items()} == {
        "logits": (2, 70), "maxima": (2, 2), "residual": (5, 16), "hidden": (2, 16),
    }  # fmt: skip
    for name, rows in found.items():  # nothing of a later op lies where an output does
        np.testing.assert_array_equal(rows, executor.read(program_buffer(program, name), len(rows)))
    arrays.logit_rows[0] = 1
    again = executor.run_head(1)
    for name in ("logits", "maxima", "hidden"):
        np.testing.assert_allclose(again[name], found[name][1:], atol=1e-5)
    np.testing.assert_array_equal(again["residual"], found["residual"])
    np.testing.assert_array_equal(found["maxima"][:, 1], found["logits"][:, 64:].max(1))
    executor.close()


def program_buffer(program: Program, output: str) -> str:
    return next(x.buffer for x in program.outputs if x.name == output)


def test_outputs_live_to_the_end_of_a_step() -> None:
    """Attention's rows are needed no longer than the next linear, unless they are an output."""
    program = more_outputs()
    assert live_buffers(program)[-1] >= {output.buffer for output in program.outputs}
    assert "mixed" not in live_buffers(program)[-1]
    kept = replace(program, outputs=(*program.outputs, Output("mixed", "mixed")))
    assert "mixed" in live_buffers(kept)[-1]


def test_fusing_keeps_outputs() -> None:
    """An int8 head takes the rounded rows of the norm alone, unless the caller reads the others."""
    plain = lower(decoder_spec(70, 16, 24, (2, 1, 8), [0]), NumberFormats("f32", "f32", head=I8), fused=False)
    assert "last_hidden" not in {buffer.name for buffer in fuse(plain).buffers}
    kept = replace(plain, outputs=(*plain.outputs, Output("hidden", "last_hidden")))
    assert fuse(kept).buffer("last_hidden").dtype == "f32"


def test_an_output_is_a_float32_buffer() -> None:
    program = more_outputs()
    for buffer in ("nothing", "last_hidden_bytes"):
        with pytest.raises(ValueError, match=f"output hidden: {buffer} is no float32 buffer"):
            replace(program, outputs=(Output("hidden", buffer),))
