"""Golden parity: logits of every family equal transformers' whole, chunked, decoding and in mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from conftest import Golden

from helpers.backends import BACKENDS, Backend
from helpers.checkpoints import LENGTH, TINY_MODELS, TinyModel, random_tokens, tiny_model
from helpers.specs import BF16, F32
from helpers.stepper import Stepper
from quire.executor.base import Limits
from quire.program.lower import NumberFormats

LIMITS = Limits(max_tokens=64, max_rows=5, max_logit_rows=8, max_len=LENGTH, num_blocks=40)
MakeGolden = Callable[..., Golden]
pytestmark = [
    pytest.mark.parametrize("backend", BACKENDS, ids=str),
]

# Steps of a mixed batch: new tokens of each sequence. Sequences start, prefill in chunks and decode in turn.
MIXED: Sequence[Mapping[int, int]] = (
    {0: 20},
    {0: 1, 1: 9},
    {0: 1, 1: 16, 2: 30},
    *({0: 1, 1: 1, 2: 1},) * 4,
    {0: 1, 2: 1, 3: 17},
    {0: 1, 1: 7, 2: 1, 3: 28},
    *({0: 1, 1: 1, 2: 1},) * 5,
    {1: 2, 2: 3},
)


def largest_difference(
    golden: Golden, backend: Backend, steps: Sequence[Mapping[int, int]], formats: NumberFormats = F32
) -> float:
    """Largest |logit - transformers' logit| over every token of the steps; sequence i is random_tokens(i)."""
    executor = backend.load(golden.folder, formats)
    stepper = Stepper(executor.program, LIMITS, seed=1)
    executor.bind(LIMITS, stepper.arrays)
    done: dict[int, int] = {}
    worst = 0.0
    for counts in steps:
        while len(done) <= max(counts):
            number = stepper.add(random_tokens(len(done)))
            done[number] = 0
        for number, logits in stepper.step(executor, counts).items():
            expected = golden.logits(number)[done[number] :][: len(logits)]
            done[number] += len(logits)
            assert logits.shape == expected.shape
            worst = max(worst, float(np.abs(logits - expected).max()))
    executor.close()
    return worst


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_reference_is_worth_comparing_with(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    logits = golden(model).logits(0)
    assert 1.5 < np.abs(logits).max() < 6.0


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_whole(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    assert largest_difference(golden(model), backend, [{0: LENGTH}]) <= backend.tolerance


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_uneven_chunks(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    steps = [{0: n} for n in (7, 1, 16, 15, 6)]
    assert largest_difference(golden(model), backend, steps) <= backend.tolerance


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_decode(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    steps = [{0: 5}] + [{0: 1}] * (LENGTH - 5)
    assert largest_difference(golden(model), backend, steps) <= backend.tolerance


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_mixed_batch(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    assert largest_difference(golden(model), backend, MIXED) <= backend.tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_checkpoints_are_read_exactly(
    dtype: torch.dtype, backend: Backend, golden: MakeGolden
) -> None:
    """Stored in 16 bits, computed in float32: the same numbers as transformers with the weights widened."""
    stored = golden(tiny_model("qwen3"), dtype)
    assert largest_difference(stored, backend, MIXED) <= backend.tolerance


BF16_UNIT = 2.0**-8  # half the spacing of bfloat16 at 1, its relative rounding error


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_bfloat16_is_as_far_as_its_rounding(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    """Weights are exact in bfloat16; inputs of linears and the cache are rounded, four times a layer."""
    stored = golden(model, torch.bfloat16)
    far = largest_difference(stored, backend, MIXED, BF16)
    scale = np.abs(stored.logits(0)).max()
    assert 1e-4 < far < 8 * BF16_UNIT * scale
