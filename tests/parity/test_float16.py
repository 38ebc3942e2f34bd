"""float16 weights give the results of float32 with the same weights; a float32 output head on bfloat16 weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.backends import NATIVE, Backend
from helpers.checkpoints import tiny_model
from helpers.golden import MakeGolden
from helpers.runs import MIXED, run_steps
from helpers.specs import BF16, F32
from helpers.stepper import Stepper
from helpers.weight_files import write
from quire.config.shipped import shipped_models
from quire.executor.base import Limits
from quire.loader import Checkpoint
from quire.loader.load import widened
from quire.offline.scorer import log_softmax
from quire.program.formats import NumberFormats, WeightFormat

EXACT = NumberFormats("f16", "f32")
F16 = NumberFormats("f16", "f16")
TOKENS = 160
# Tied and with norms of heads; fused and windowed; latents, a dense layer and experts; experts with biases and sinks.
MODELS = ("qwen3", "phi3-window", "deepseek3", "gpt-oss")


@pytest.mark.parametrize("name", MODELS)
def test_weights_in_float16_have_the_bits_of_float32(name: str, golden: MakeGolden) -> None:
    """Embedding, linears, experts, linears by head and output head, in steps of any size."""
    folder = golden(tiny_model(name), torch.float16).folder
    found, expected, rounded = (run_steps(folder, NATIVE, MIXED, form) for form in (EXACT, F32, BF16))
    for one, other, third in zip(found, expected, rounded, strict=True):
        assert np.array_equal(one.view(np.uint32), other.view(np.uint32))
        assert not np.array_equal(third, other)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with weights that only float16 holds: each moved by less than half a step of bfloat16."""
    shipped, folder = shipped_models()["quire-mini"], tmp_path_factory.mktemp("trained")
    random = np.random.default_rng(0)
    config = json.loads((shipped / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    with Checkpoint(shipped) as source:
        tensors = {}
        for name in source.names():
            weight = widened(source.read(name), source.info(name).dtype)
            moved = weight * (1 + (random.random(weight.shape, np.float32) - 0.5) / 128)
            tensors[name] = moved.astype(np.float16)
    write(folder / "model.safetensors", tensors)
    shutil.copy(shipped / "tokenizer.json", folder)
    return folder


def logits(folder: Path, formats: NumberFormats, backend: Backend = NATIVE) -> np.ndarray:
    """Of tokens that the model itself finds likely: it has been trained on such."""
    limits = Limits(TOKENS, 1, TOKENS, TOKENS, TOKENS // 16)
    executor = backend.load(folder, formats)
    stepper = Stepper(executor.program, limits)
    executor.bind(limits, stepper.arrays)
    tokens = stepper.add(np.random.default_rng(1).integers(200, 3000, TOKENS).tolist())
    found = stepper.step(executor, {tokens: TOKENS})[tokens]
    executor.close()
    return found


def divergence(exact: np.ndarray, found: np.ndarray) -> float:
    """Mean KL of the predictions."""
    log_p, log_q = log_softmax(exact), log_softmax(found)
    return float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())


def test_the_cost_of_each_format(trained: Path) -> None:
    """float16 moves predictions far less than bfloat16; a cache of bfloat16 would undo most of that."""
    exact = logits(trained, F32)
    cost = {
        (form.weights, form.kv): divergence(exact, logits(trained, form))
        for form in (EXACT, F16, BF16, NumberFormats("f16", "bf16"))
    }
    assert cost["f16", "f32"] == 0
    assert 0 < cost["f16", "f16"] < cost["bf16", "bf16"] / 30
    assert cost["f16", "bf16"] > 20 * cost["f16", "f16"]


def test_a_float32_head_is_nearer_to_float32(trained: Path) -> None:
    """Logits with bfloat16 weights; the tied embedding belongs to the head, in full."""
    exact = logits(trained, F32)
    wide = NumberFormats("bf16", "bf16", head=WeightFormat("f32"))
    for other in (BF16, NumberFormats("bf16", "f32")):
        near = logits(trained, NumberFormats("bf16", other.kv, head=wide.head))
        far = logits(trained, other)
        assert np.square(near - exact).mean() < np.square(far - exact).mean()
