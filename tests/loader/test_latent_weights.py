"""kv_b of latent attention, split by head while it is read: from plain files, from FP8 in blocks, with errors named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.backends import NATIVE, Backend
from helpers.checkpoints import save, tiny_model
from helpers.runs import LIMITS
from helpers.specs import F32
from helpers.stepper import Stepper
from quire.executor.base import F32 as Floats
from quire.executor.base import Executor
from quire.executor.torch import TorchExecutor
from quire.loader import Checkpoint, LoadRules, QuantizedSource, load
from quire.program.lower import lower
from quire.spec.facts import read_model
from quire.types import CheckpointError

BLOCK = 16  # rows and columns that share a scale; heads have 16 + 12 rows, so blocks cross them


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save(tiny_model("deepseek3-dense-halves"), folder)
    return folder


def fp8(plain: Path, to: Path) -> tuple[Path, Path]:
    """The checkpoint with its linears as E4M3 and weight_scale_inv in blocks; and with the numbers that those are."""
    stored, values = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if "_proj" not in name or weight.ndim != 2:
            stored[name] = values[name] = weight
            continue
        rows, cols = (-(-size // BLOCK) * BLOCK for size in weight.shape)
        padded = torch.zeros(rows, cols)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        whole = (codes.float() * scale[:, None, :, None]).view(rows, cols)
        stored[name] = codes.view(rows, cols)[: weight.shape[0], : weight.shape[1]].contiguous()
        stored[f"{name}_scale_inv"] = scale
        values[name] = whole[: weight.shape[0], : weight.shape[1]].contiguous()
    config = json.loads((plain / "config.json").read_text())
    settings = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    }
    folders = to / "fp8", to / "values"
    for folder, tensors, more in zip(
        folders, (stored, values), ({"quantization_config": settings}, {}), strict=True
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, folder / "model.safetensors")
    return folders


def logits(executor: Executor) -> Floats:
    stepper = Stepper(executor.program, LIMITS)
    executor.bind(LIMITS, stepper.arrays)
    number = stepper.add(list(range(40)))
    return stepper.step(executor, {number: 40})[number]


@pytest.mark.parametrize("backend", [NATIVE, Backend("torch", TorchExecutor, 1e-5)], ids=str)
def test_fp8_in_blocks_across_heads(plain: Path, tmp_path: Path, backend: Backend) -> None:
    """Equal bits to the numbers that the codes stand for, and not those of the plain weights."""
    quantized, values = fp8(plain, tmp_path)
    facts = read_model(quantized)
    assert facts.quantization is not None
    executor = backend.make(lower(facts.spec, F32))
    with Checkpoint(quantized) as checkpoint:
        source = QuantizedSource(checkpoint, facts.quantization)
        load(executor.program.params, source, executor, rules=LoadRules.of(facts.spec, quantized=True))
    found = logits(executor)
    np.testing.assert_array_equal(found, logits(backend.load(values, F32)))
    assert np.abs(found - logits(backend.load(plain, F32))).max() > 1e-3


@pytest.mark.parametrize("at", [(30, 7), (45, 0)], ids=["of a key, turned over", "of a value"])
def test_a_number_that_is_not_finite_is_named(plain: Path, tmp_path: Path, at: tuple[int, int]) -> None:
    tensors = load_file(plain / "model.safetensors")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    tensors[name][at] = float("nan")
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}: element \[{at[0]}, {at[1]}\] is NaN"):
        NATIVE.load(tmp_path, F32)


def test_a_kv_b_of_another_shape_is_refused(plain: Path, tmp_path: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"v_head_dim": 14}))
    (tmp_path / "model.safetensors").symlink_to(plain / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"kv_b_proj.weight: shape \[112, 40\], but the config implies \[120, 40\]"
    ):
        NATIVE.load(tmp_path, F32)
