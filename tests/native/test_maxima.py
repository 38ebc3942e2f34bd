"""Maxima of 64 logits each, left by the op that writes the logits: whatever the weight's format, rows and threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.checkpoints import random_tokens
from helpers.specs import BF16, F32, I8, decoder_spec
from helpers.stepper import Stepper, StepSize
from quire import _native
from quire.executor.base import F32 as Floats
from quire.executor.base import Limits
from quire.executor.native import NativeExecutor
from quire.loader import RandomWeights, load
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.ops.linear import Linear
from quire.program.ops.rows import Scale
from quire.spec import ModelSpec

VOCAB = 1353  # 21 spans and 9 columns; more than one task of Scale
LIMITS = Limits(max_tokens=160, max_rows=2, max_logit_rows=130, max_len=160, num_blocks=20)
SPEC = decoder_spec(VOCAB, 72, 100, (4, 2, 16), [0])
FORMATS = {
    "f32": F32,
    "bf16": BF16,
    "f16": NumberFormats("f16", "f16"),
    "int8": NumberFormats("bf16", "bf16", I8, I8),
    "int4": NumberFormats("bf16", "bf16", WeightFormat("i4", Groups(32)), WeightFormat("i4", Groups(32))),
}
CAPPED = replace(SPEC, logits_scale=0.5, logits_cap=30.0)


def opened(
    spec: ModelSpec, formats: NumberFormats, isa: str, threads: int
) -> tuple[NativeExecutor, StepSize]:
    program = lower(spec, formats)
    executor = NativeExecutor(program, threads=threads, isa=isa)
    load(program.params, RandomWeights(program.params), executor)
    stepper = Stepper(program, LIMITS)
    executor.bind(LIMITS, stepper.arrays)
    size = stepper.fill({stepper.add(random_tokens(0, 130)): 130})
    stepper.arrays.logit_rows[:130] = range(130)
    return executor, size


def by_hand(logits: Floats) -> Floats:
    spans = [logits[:, first : first + 64] for first in range(0, VOCAB, 64)]
    with np.errstate(invalid="ignore"):
        return np.stack([np.where((s < np.inf).all(1), s.max(1), np.nan) for s in spans], 1)


@pytest.mark.parametrize("isa", _native.supported_isas())
@pytest.mark.parametrize("case", FORMATS)
def test_maxima_are_those_of_the_logits(case: str, isa: str) -> None:
    for spec, threads in ((SPEC, 1), (CAPPED, 3)):
        executor, size = opened(spec, FORMATS[case], isa, threads)
        kinds = [type(op) for op in executor.program.ops if getattr(op, "maxima", None)]
        assert kinds == [Scale if spec is CAPPED else Linear]
        for rows in (1, 2, 31, 130):
            left = executor.run(size.num_tokens, size.num_rows, rows)
            assert np.array_equal(left["maxima"], by_hand(left["logits"]))
        executor.close()


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_logits_that_are_not_finite(isa: str) -> None:
    """NaN and +inf say so; -inf is a number like others, also where all are."""
    executor, size = opened(replace(SPEC, logits_scale=0.5), F32, isa, 2)
    scale = len(executor.program.ops) - 1
    left = executor.run(size.num_tokens, size.num_rows, 5)
    logits, maxima = left["logits"], left["maxima"]
    for column in (0, 63, 64, 1300, VOCAB - 1):
        for value in (np.nan, np.inf, -np.inf):
            logits[:] = np.random.default_rng(column).normal(0, 3, logits.shape)
            logits[2, column] = value
            logits[3] = -np.inf
            executor.run_range(size.num_tokens, size.num_rows, 5, scale, scale + 1)
            assert np.array_equal(maxima, by_hand(logits), equal_nan=True)
            assert np.isnan(maxima).sum() == (value != -np.inf)
    executor.close()
