"""Experts stacked in one tensor load as the same numbers as experts with a tensor each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.checkpoints import save, tiny_model
from helpers.specs import moe_spec
from quire.executor.torch import TorchExecutor
from quire.loader import Checkpoint, LoadRules, QuantizedSource, load
from quire.loader.source import Array, CodesSource
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.quant import GroupCodes, dequantize
from quire.spec import ModelSpec, Router
from quire.spec.facts import read_model
from quire.spec.model import ClampedSwiGLU, ExpertStacks
from quire.spec.quantization import Quantization
from quire.types import CheckpointError

SPEC = moe_spec(Router(3, 2), 32, dim=64, act=ClampedSwiGLU(), bias=True, dense=(0,))
AT = "model.layers.1.mlp.experts"
ORDERS = {
    "plain": ExpertStacks(),
    "transposed": ExpertStacks(transposed=True),
    "interleaved": ExpertStacks(interleaved=True),
    "both": ExpertStacks(transposed=True, interleaved=True),
}


def experts() -> dict[str, Array]:
    """Every tensor of the experts of the layer that has some, one each."""
    random = np.random.default_rng(0)
    params = [p for p in lower(SPEC, NumberFormats("f32", "f32")).params if p.experts]
    return {
        part.tensor: random.standard_normal(part.shape).astype(np.float32) for p in params for part in p.parts
    }


def stacked(each: Mapping[str, Array], order: ExpertStacks) -> dict[str, Array]:
    """The same as a checkpoint stacks them."""
    found = {}
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        gate, up, down = (
            np.stack([each[f"{AT}.{e}.{name}_proj.{kind}"] for e in range(3)])
            for name in ("gate", "up", "down")
        )
        both = np.concatenate((gate, up), axis=1)
        if order.interleaved:
            both = np.stack((gate, up), axis=2).reshape(both.shape)
        for name, stack in (("gate_up_proj", both), ("down_proj", down)):
            turned = stack.transpose(0, 2, 1) if order.transposed and stack.ndim == 3 else stack
            found[f"{AT}.{name}{suffix}"] = np.ascontiguousarray(turned)
    return found


def written(folder: Path, tensors: Mapping[str, Array]) -> Path:
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("order", ORDERS)
def test_every_order(order: str, tmp_path: Path) -> None:
    each, spec = experts(), replace(SPEC, stacks=ORDERS[order])
    with Checkpoint(written(tmp_path, stacked(each, ORDERS[order]))) as checkpoint:
        view = LoadRules.of(spec).view(checkpoint)
        assert set(view.names()) == set(each)
        for name, tensor in each.items():
            assert view.info(name).shape == tensor.shape
            np.testing.assert_array_equal(view.read(name), tensor)
            np.testing.assert_array_equal(view.read(name, 3, 11), tensor[3:11])
            view.release(name)


def test_wrong_order_is_seen(tmp_path: Path) -> None:
    """Negative control: turns that are not undone give other experts."""
    each = experts()
    with Checkpoint(written(tmp_path, stacked(each, ORDERS["interleaved"]))) as checkpoint:
        view = LoadRules.of(SPEC).view(checkpoint)
        name = f"{AT}.1.up_proj.weight"
        assert not np.array_equal(view.read(name), each[name])


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    tensors = stacked(experts(), ORDERS["transposed"])
    with (
        Checkpoint(written(tmp_path, tensors)) as checkpoint,
        pytest.raises(
            CheckpointError, match=r"gate_up_proj: shape \[3, 64, 64\]|down_proj: shape \[3, 32, 64\]"
        ),
    ):
        LoadRules.of(SPEC).view(checkpoint)


def test_an_expert_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    each = experts()
    name = f"{AT}.2.down_proj.weight"
    error = r"experts\.2\.down_proj\.weight exists separately and in"
    folder = written(tmp_path, stacked(each, ORDERS["plain"]) | {name: each[name]})
    with Checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match=error):
        LoadRules.of(SPEC).view(checkpoint)


def mxfp4(random: np.random.Generator, rows: int, cols: int) -> dict[str, Array]:
    return {
        "blocks": random.integers(0, 256, (3, rows, cols // 32, 16), dtype=np.uint8),
        "scales": random.integers(118, 126, (3, rows, cols // 32), dtype=np.uint8),
    }


def test_mxfp4_stacks_in_turns(tmp_path: Path) -> None:
    """gpt-oss's own format: floats and codes of one expert are rows of the stack, every other one of gate and up."""
    random, spec = np.random.default_rng(1), replace(SPEC, stacks=ORDERS["both"])
    tensors = {
        f"{AT}.{name}_{part}": array
        for name, rows, cols in (("gate_up_proj", 64, 64), ("down_proj", 64, 32))
        for part, array in mxfp4(random, rows, cols).items()
    }
    with Checkpoint(written(tmp_path, tensors)) as checkpoint:
        source = QuantizedSource(checkpoint, Quantization("MXFP4", "mxfp4"))
        view = LoadRules.of(spec, quantized=True).view(source)
        assert isinstance(view, CodesSource)
        both, down = source.read(f"{AT}.gate_up_proj"), source.read(f"{AT}.down_proj")
        expected = {"gate": both[:, 0::2], "up": both[:, 1::2], "down": down}
        for e in range(3):
            for name, values in expected.items():
                tensor = f"{AT}.{e}.{name}_proj.weight"
                np.testing.assert_array_equal(view.read(tensor), values[e])
                assert view.info(tensor).stored == "MXFP4"
                form, codes = view.packed(tensor), view.read_codes(tensor, 1, 5)
                assert form is not None
                assert form.groups is not None
                assert isinstance(codes, GroupCodes)
                np.testing.assert_array_equal(dequantize(form.groups, 8, codes), values[e][1:5])


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen2-moe-dense-layers"])
def test_both_ways_that_transformers_writes(name: str, tmp_path: Path) -> None:
    """transformers 5 keeps experts stacked in memory, and on disk on request."""
    one, two = tmp_path / "each", tmp_path / "stacked"
    reference = save(tiny_model(name), one)
    reference.save_pretrained(two, save_original_format=False)
    found = []
    for folder in (one, two):
        spec: ModelSpec = read_model(folder).spec
        executor = TorchExecutor(lower(spec, NumberFormats("f32", "f32")))
        with Checkpoint(folder) as source:
            assert any("gate_up_proj" in tensor for tensor in source.names()) == (folder == two)
            load(executor.program.params, source, executor, rules=LoadRules.of(spec))
        found.append({p.name: executor._weights[p.name].numpy() for p in executor.program.params})
    for param, tensor in found[0].items():
        np.testing.assert_array_equal(found[1][param], tensor)
