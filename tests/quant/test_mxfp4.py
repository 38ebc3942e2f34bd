"""gpt-oss's MXFP4 experts: equal in every bit to transformers' conversion, to codes in groups, and to the formula."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.loader import Checkpoint, QuantizedSource
from quire.quant.groups import dequantize
from quire.quant.linear_codes import Stored
from quire.quant.mxfp4 import MXFP4, half_scales, mxfp4
from quire.spec.quantization import Quantization
from quire.types import CheckpointError

EXPERTS, ROWS, BLOCKS = 3, 6, 2


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "blocks": rng.integers(0, 256, (EXPERTS, ROWS, BLOCKS, 16), dtype=np.uint8),
        "scales": rng.integers(100, 140, (EXPERTS, ROWS, BLOCKS), dtype=np.uint8),
    }


def opened(arrays: dict[str, np.ndarray]) -> MXFP4:
    return mxfp4({name: Stored("U8", array.shape) for name, array in arrays.items()}, "m")


def test_the_numbers_of_transformers(arrays: dict[str, np.ndarray]) -> None:
    stored = (torch.from_numpy(arrays[name]) for name in ("blocks", "scales"))
    expected = convert_moe_packed_tensors(*stored, dtype=torch.float32)
    linear = opened(arrays)
    assert linear.shape == (EXPERTS, ROWS, 32 * BLOCKS)
    found = linear.dequantize(arrays, 0, EXPERTS)
    np.testing.assert_array_equal(found, expected.transpose(1, 2).numpy())
    np.testing.assert_array_equal(linear.dequantize(arrays, 1, 2), found[1:2])
    assert len(np.unique(np.abs(found[:, :, :32] / half_scales(arrays["scales"])[:, :, :1]))) == 8


def test_codes_are_the_same_numbers(arrays: dict[str, np.ndarray]) -> None:
    linear = opened(arrays)
    assert linear.packed.groups is not None
    values = dequantize(linear.packed.groups, 8, linear.codes(arrays, 1, 3))
    np.testing.assert_array_equal(values, linear.dequantize(arrays, 1, 3).reshape(2 * ROWS, -1))


def test_every_exponent() -> None:
    found = half_scales(np.arange(256, dtype=np.uint8))
    assert [float(scale) for scale in found[:255]] == [2.0 ** (e - 128) for e in range(255)]
    assert np.isnan(found[255])


def test_shapes_that_do_not_fit_are_named(arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(CheckpointError, match=r"m: blocks: shape \[3, 6, 32\] is not"):
        opened(arrays | {"blocks": arrays["blocks"].reshape(EXPERTS, ROWS, -1)})
    with pytest.raises(CheckpointError, match=r"m: scales: shape \[3, 6, 1\]"):
        opened(arrays | {"scales": arrays["scales"][..., :1]})
    with pytest.raises(CheckpointError, match="m: scales: dtype F16 is not U8"):
        mxfp4({"blocks": Stored("U8", (1, 2, 1, 16)), "scales": Stored("F16", (1, 2, 1))}, "m")


def test_through_the_loader(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    bias = np.zeros((EXPERTS, ROWS), np.float32)
    save_file({f"{name}_{part}": array for part, array in arrays.items()} | {f"{name}_bias": bias},
              tmp_path / "model.safetensors")  # fmt: skip
    with Checkpoint(tmp_path) as checkpoint:
        source = QuantizedSource(checkpoint, Quantization("MXFP4", "mxfp4"))
        assert set(source.names()) == {name, f"{name}_bias"}
        info = source.info(name)
        assert (info.shape, info.stored) == ((EXPERTS, ROWS, 32 * BLOCKS), "MXFP4")
        expected = opened(arrays).dequantize(arrays, 0, EXPERTS)
        np.testing.assert_array_equal(source.read(name), expected)
        np.testing.assert_array_equal(source.read(name, 1, 3), expected[1:3])
