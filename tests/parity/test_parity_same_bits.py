"""The same answer whatever else is running: equal bits whole, in chunks, decoded, together with other sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.backends import NATIVE
from helpers.checkpoints import TINY_MODELS, TinyModel
from helpers.golden import MakeGolden
from helpers.runs import CHUNKS, DECODE, MIXED, WHOLE, run_steps
from helpers.specs import BF16, F32
from quire.program.formats import NumberFormats


@pytest.mark.parametrize("formats", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_native_gives_the_same_bits(model: TinyModel, formats: NumberFormats, golden: MakeGolden) -> None:
    folder = golden(model, torch.bfloat16).folder
    (whole,) = run_steps(folder, NATIVE, WHOLE, formats)
    for steps in (CHUNKS, DECODE, MIXED):
        other = run_steps(folder, NATIVE, steps, formats)[0]
        np.testing.assert_array_equal(other, whole[: len(other)])
