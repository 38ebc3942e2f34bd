"""Golden parity: logits of every family equal transformers' whole, chunked, decoding and in mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
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


def differences(
    golden: Golden, backend: Backend, steps: Sequence[Mapping[int, int]], formats: NumberFormats = F32
) -> npt.NDArray[np.float32]:
    """|logit - transformers' logit| of every token of the steps; sequence i is random_tokens(i)."""
    executor = backend.load(golden.folder, formats)
    stepper = Stepper(executor.program, LIMITS, seed=1)
    executor.bind(LIMITS, stepper.arrays)
    done: dict[int, int] = {}
    found = []
    for counts in steps:
        while len(done) <= max(counts):
            number = stepper.add(random_tokens(len(done)))
            done[number] = 0
        for number, logits in stepper.step(executor, counts).items():
            expected = golden.logits(number)[done[number] :][: len(logits)]
            done[number] += len(logits)
            assert logits.shape == expected.shape
            found.append(np.abs(logits - expected))
    executor.close()
    return np.concatenate(found)


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_reference_is_worth_comparing_with(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    logits = golden(model).logits(0)
    assert 1.5 < np.abs(logits).max() < 6.0


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_whole(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    assert differences(golden(model), backend, [{0: LENGTH}]).max() <= backend.tolerance


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_uneven_chunks(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    steps = [{0: n} for n in (7, 1, 16, 15, 6)]
    assert differences(golden(model), backend, steps).max() <= backend.tolerance


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_decode(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    steps = [{0: 5}] + [{0: 1}] * (LENGTH - 5)
    assert differences(golden(model), backend, steps).max() <= backend.tolerance


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_mixed_batch(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    assert differences(golden(model), backend, MIXED).max() <= backend.tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_checkpoints_are_read_exactly(
    dtype: torch.dtype, backend: Backend, golden: MakeGolden
) -> None:
    """Stored in 16 bits, computed in float32: the same numbers as transformers with the weights widened."""
    stored = golden(tiny_model("qwen3"), dtype)
    assert differences(stored, backend, MIXED).max() <= backend.tolerance


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_bfloat16_is_nearer_than_transformers(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    """Against float32 with the same weights: what rounding costs, root mean square.

    Inputs of linears and the cache are rounded, the residual stream and the sums are not; transformers in
    bfloat16 rounds everything. Measured: about half as far on every model.
    """
    stored = golden(model, torch.bfloat16)
    ours = differences(stored, backend, MIXED, BF16)
    theirs = np.concatenate([stored.bfloat16_logits(seed) - stored.logits(seed) for seed in range(3)])
    assert 1e-4 < np.sqrt(np.square(ours).mean()) < 0.75 * np.sqrt(np.square(theirs).mean())
