"""gpt-oss as it is released, its experts in MXFP4: logits of transformers with the numbers that the codes stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.backends import BACKENDS, Backend
from helpers.checkpoints import LENGTH, random_tokens, reference_logits
from helpers.quantized_folders import mxfp4_folder
from helpers.stepper import Stepper
from quire.engine.build.assemble import open_weights, weight_origin
from quire.engine.build.opening import open_model
from quire.executor.base import Limits
from quire.loader import load
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower

LIMITS = Limits(max_tokens=LENGTH, max_rows=1, max_logit_rows=LENGTH, max_len=LENGTH, num_blocks=20)
CODES = WeightFormat("i8", Groups(32, "f32"))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_floats_are_exact_and_codes_are_near(backend: Backend, tmp_path: Path) -> None:
    expected = reference_logits(mxfp4_folder(tmp_path), random_tokens(0))
    model = open_model(tmp_path)
    spec, found = model.facts.spec, []
    codes = {
        f"layers.{i}.experts.{name}": CODES for i in range(len(spec.layers)) for name in ("gate_up", "down")
    }
    for formats in (NumberFormats("f32", "f32"), NumberFormats("f32", "f32", params=codes)):
        executor = backend.make(lower(spec, formats))
        with open_weights(model) as source:
            summary = load(executor.program.params, source, executor, rules=weight_origin(model).rules)
        assert summary.dequantized == (() if formats.params else ("MXFP4",))
        stepper = Stepper(executor.program, LIMITS)
        executor.bind(LIMITS, stepper.arrays)
        number = stepper.add(random_tokens(0))
        found.append(np.abs(stepper.step(executor, {number: LENGTH})[number] - expected))
    assert found[0].max() <= backend.tolerance
    assert 1e-4 < np.median(found[1]) < 0.05  # inputs of experts are rounded to eight bits
