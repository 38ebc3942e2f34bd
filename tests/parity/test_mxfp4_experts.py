"""gpt-oss as it is released, its experts in MXFP4: logits of transformers with the numbers that the codes stand for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.backends import BACKENDS, Backend
from helpers.checkpoints import LENGTH, random_tokens, reference_logits, save, tiny_model
from helpers.stepper import Stepper
from quire.engine.build import open_weights, weight_origin
from quire.engine.opening import open_model
from quire.executor.base import F32, Limits
from quire.loader import load
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.quant.linear import Stored
from quire.quant.mxfp4 import mxfp4

LIMITS = Limits(max_tokens=LENGTH, max_rows=1, max_logit_rows=LENGTH, max_len=LENGTH, num_blocks=20)
CODES = WeightFormat("i8", Groups(32, "f32"))


def released(folder: Path) -> F32:
    """Write a tiny gpt-oss with MXFP4 experts; transformers' logits with the same numbers in float32."""
    small = tiny_model("gpt-oss")
    model = save(
        type(small)("gpt-oss-mxfp4", small.config_class, {**small.overrides, "intermediate_size": 64}), folder
    )
    tensors, random = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    for name, weight in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, cols, rows = weight.shape
        arrays = {
            "blocks": random.integers(0, 256, (experts, rows, cols // 32, 16), dtype=np.uint8),
            "scales": random.integers(121, 124, (experts, rows, cols // 32), dtype=np.uint8),
        }
        linear = mxfp4({part: Stored("U8", array.shape) for part, array in arrays.items()}, name)
        numbers = torch.from_numpy(linear.dequantize(arrays, 0, experts))
        with torch.no_grad():
            weight.copy_(numbers.transpose(1, 2))
        del tensors[name]
        tensors |= {f"{name}_{part}": torch.from_numpy(array) for part, array in arrays.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return reference_logits(model, random_tokens(0))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_floats_are_exact_and_codes_are_near(backend: Backend, tmp_path: Path) -> None:
    expected = released(tmp_path)
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
