"""Golden parity: logits of every family equal transformers' whole, chunked, decoding and in mixed batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.backends import BACKENDS, TORCH, Backend
from helpers.checkpoints import TINY_MODELS, TinyModel, tiny_model
from helpers.golden import Golden, MakeGolden
from helpers.pairs import pairwise
from helpers.runs import CHUNKS, DECODE, MIXED, WHOLE, Logits, Steps, run_steps
from helpers.specs import BF16, F32
from quire.program.formats import NumberFormats

STEPS = {"whole": WHOLE, "chunks": CHUNKS, "decode": DECODE, "mixed": MIXED}
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def differences(golden: Golden, backend: Backend, steps: Steps, formats: NumberFormats = F32) -> Logits:
    """|logit - transformers' logit| of every token of the steps."""
    found = run_steps(golden.folder, backend, steps, formats)
    return np.concatenate(
        [np.abs(logits - golden.logits(i)[: len(logits)]) for i, logits in enumerate(found)]
    )


@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_reference_is_worth_comparing_with(model: TinyModel, golden: MakeGolden) -> None:
    logits = golden(model).logits(0)
    assert 1.5 < np.abs(logits).max() < 6.0


@pytest.mark.parametrize(("model", "backend", "steps"), pairwise(TINY_MODELS, BACKENDS, [*STEPS]))
def test_logits_are_those_of_transformers(
    model: TinyModel, backend: Backend, steps: str, golden: MakeGolden
) -> None:
    assert differences(golden(model), backend, STEPS[steps]).max() <= backend.tolerance


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_checkpoints_are_read_exactly(
    dtype: torch.dtype, backend: Backend, golden: MakeGolden
) -> None:
    """Stored in 16 bits, computed in float32: the same numbers as transformers with the weights widened."""
    stored = golden(tiny_model("qwen3"), dtype)
    assert differences(stored, backend, MIXED).max() <= backend.tolerance


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        # The kernels of every model, the definition of every fourth: tests/parity/test_op_by_op.py compares both.
        pytest.param(model, backend, marks=pytest.mark.long if backend is TORCH and number % 4 else [])
        for number, model in enumerate(TINY_MODELS)
        for backend in BACKENDS
    ],
    ids=str,
)
def test_bfloat16_is_nearer_than_transformers(model: TinyModel, backend: Backend, golden: MakeGolden) -> None:
    """Against float32 with the same weights: what rounding costs, root mean square, in the median over tokens.

    A token that goes to another expert after a rounding costs more, and happens to either; the median leaves such
    tokens out. Inputs of linears and the cache are rounded, the residual stream and the sums are not; transformers
    in bfloat16 rounds everything. Measured: about half as far on every model.
    """
    stored = golden(model, torch.bfloat16)
    ours = differences(stored, backend, MIXED, BF16)
    theirs = np.concatenate([stored.bfloat16_logits(seed) - stored.logits(seed) for seed in range(3)])
    near, far = (np.median(np.sqrt(np.square(x).mean(axis=1))) for x in (ours, theirs))
    assert 1e-4 < near < 0.75 * far
