"""Checkpoints whose weights are random numbers of a quantized format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from helpers import packing
from helpers.checkpoints import save, tiny_model
from quire.loader import Checkpoint
from quire.quant.linear_codes import Stored
from quire.quant.mxfp4 import mxfp4

LINEAR = re.compile(r"model\.layers\.\d\.(self_attn|mlp)\..*_proj")
Arrays = dict[str, np.ndarray | torch.Tensor]
Packer = Callable[[np.random.Generator, int, int], tuple[Arrays, np.ndarray]]


def _w8a8(*, dynamic: bool) -> dict[str, Any]:
    """The config group that compressed-tensors writes for 8-bit weights and activations."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = weights | {
        "strategy": "token" if dynamic else "tensor",
        "dynamic": dynamic,
        "symmetric": dynamic,
    }
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}


FORMATS: dict[str, tuple[dict[str, Any], Packer]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        lambda rng, r, c: packing.gptq(rng, r, c, bits=4, group=32),
    ),
    "gptq-desc-act": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        lambda rng, r, c: packing.gptq(rng, r, c, bits=4, group=32, g_idx=rng.permutation(np.arange(c) // 32)),
    ),
    "gptq-3-bits": (
        {"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": False},
        lambda rng, r, c: packing.gptq(rng, r, c, bits=3, group=32),
    ),
    "gptq-2-bits": (
        {"quant_method": "gptq", "bits": 2, "group_size": 32, "desc_act": False},
        lambda rng, r, c: packing.gptq(rng, r, c, bits=2, group=32),
    ),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 8, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
        lambda rng, r, c: packing.gptq(rng, r, c, bits=8, group=32),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda rng, r, c: packing.awq(rng, r, c, 32),
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
        lambda rng, r, c: packing.pack_quantized(rng, r, c, bits=4, group=32, symmetric=True),
    ),
    "int-quantized": (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": _w8a8(dynamic=True)},
        lambda rng, r, c: packing.int_quantized(rng, r, c, static=False),
    ),
    "int-quantized-static": (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": _w8a8(dynamic=False)},
        lambda rng, r, c: packing.int_quantized(rng, r, c, static=True),
    ),
    "float-quantized": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
        packing.fp8,
    ),
    "mxfp4-pack-quantized": (
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {}},
        packing.mxfp4,
    ),
    "fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        lambda rng, r, c: packing.fp8(rng, r, c, block=32),
    ),
    "fbgemm_fp8": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        packing.fp8,
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]},
        lambda rng, r, c: packing.fp8(rng, r, c, whole=True),
    ),
    "hqq": (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}, "skip_modules": ["lm_head"]},
        lambda rng, r, c: packing.hqq(rng, r, c, bits=4, group=32),
    ),
    "bitsandbytes-int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        packing.llm_int8,
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda rng, r, c: packing.nf4(rng, r, c, nested=True),
    ),
}  # fmt: skip


def quantized_folder(
    plain: Path, folder: Path, kind: str, **changes: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """The plain checkpoint with its linears as random numbers of a format, and what those numbers are."""
    settings, pack = FORMATS[kind]
    rng = np.random.default_rng(0)
    config = json.loads((plain / "config.json").read_text())
    arrays: Arrays = {}
    values: dict[str, np.ndarray] = {}
    with Checkpoint(plain) as checkpoint:
        for name in checkpoint.names():
            weight = np.array(checkpoint.read(name))
            prefix = name.removesuffix(".weight")
            if LINEAR.fullmatch(prefix):
                parts, values[name] = pack(rng, *weight.shape)
                arrays |= {f"{prefix}.{part}": array for part, array in parts.items()}
                if kind.startswith("gptq"):
                    arrays[f"{prefix}.bias"] = np.zeros(len(weight), np.float16)
            else:
                arrays[name] = values[name] = weight
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings | changes}))
    save_file(tensors(arrays), folder / "model.safetensors")
    return folder, values


def tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    """What safetensors writes; it has formats that numpy does not."""
    return {
        name: (array if isinstance(array, torch.Tensor) else torch.tensor(array)).contiguous()
        for name, array in arrays.items()
    }


def mxfp4_folder(folder: Path) -> Any:
    """Write a tiny gpt-oss with MXFP4 experts as it is released; transformers' model with the same numbers, float32."""
    small = tiny_model("gpt-oss")
    model = save(
        type(small)("gpt-oss-mxfp4", small.config_class, {**small.overrides, "intermediate_size": 64}), folder
    )
    stored, random = load_file(folder / "model.safetensors"), np.random.default_rng(0)
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
        del stored[name]
        stored |= {f"{name}_{part}": torch.from_numpy(array) for part, array in arrays.items()}
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return model
