"""Checkpoints whose linears are random numbers of a quantized format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from helpers import packing
from quire.loader import Checkpoint

LINEAR = re.compile(r"model\.layers\.\d\.(self_attn|mlp)\..*_proj")
Packer = Callable[[np.random.Generator, int, int], tuple[dict[str, np.ndarray], np.ndarray]]

FORMATS: dict[str, tuple[dict[str, Any], Packer]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        lambda rng, r, c: packing.gptq(rng, r, c, bits=4, group=32),
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
    "hqq": (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}, "skip_modules": ["lm_head"]},
        lambda rng, r, c: packing.hqq(rng, r, c, bits=4, group=32),
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
    arrays: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    with Checkpoint(plain) as checkpoint:
        for name in checkpoint.names():
            weight = np.array(checkpoint.read(name))
            prefix = name.removesuffix(".weight")
            if LINEAR.fullmatch(prefix):
                parts, values[name] = pack(rng, *weight.shape)
                arrays |= {f"{prefix}.{part}": np.ascontiguousarray(array) for part, array in parts.items()}
                if kind == "gptq":
                    arrays[f"{prefix}.bias"] = np.zeros(len(weight), np.float16)
            else:
                arrays[name] = values[name] = weight
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings | changes}))
    save_file(arrays, folder / "model.safetensors")
    return folder, values
