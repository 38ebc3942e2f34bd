"""A checkpoint folder to one in the compressed-tensors format, rounded to nearest, for vLLM.

    python quantize_vllm.py MODEL_FOLDER OUT_FOLDER w8a8|w4a16

w8a8: int8 weights with a scale for each output, inputs rounded to int8 token by token. w4a16: 4-bit weights, symmetric,
in groups of 128 inputs. The embedding and the output head stay bfloat16, which vLLM cannot quantize. Runs in vLLM's
environment.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

GROUP, PER_WORD = 128, 8


def main() -> None:
    model, out, form = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    from safetensors import safe_open
    from safetensors.torch import save_file

    pack = {"w8a8": channels, "w4a16": groups}[form]
    tensors: dict[str, Any] = {}
    with safe_open(model / "model.safetensors", "pt") as source:
        for name in source.keys():  # noqa: SIM118
            tensor = source.get_tensor(name)
            if name.endswith("_proj.weight"):
                tensors.update(pack(name.removesuffix("weight"), tensor.float()))
            else:
                tensors[name] = tensor
    out.mkdir(parents=True, exist_ok=True)
    for file in model.glob("*.json"):
        shutil.copy(file, out)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = description(form)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def channels(prefix: str, weight: Any) -> dict[str, Any]:
    """[outputs, inputs] to int8 and one scale an output."""
    import torch

    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = torch.round(weight / scale).clamp(-127, 127).to(torch.int8)
    return {f"{prefix}weight": codes, f"{prefix}weight_scale": scale.to(torch.bfloat16)}


def groups(prefix: str, weight: Any) -> dict[str, Any]:
    """[outputs, inputs] to 4-bit codes, eight in an int32 from its low bits up, and one scale a group."""
    import torch

    outputs, inputs = weight.shape
    grouped = weight.view(outputs, inputs // GROUP, GROUP)
    scale = grouped.abs().amax(2, keepdim=True) / 7
    codes = torch.round(grouped / scale).clamp(-8, 7).to(torch.int64) + 8
    places = 4 * torch.arange(PER_WORD)
    words = (codes.view(outputs, inputs // PER_WORD, PER_WORD) << places).sum(2)
    return {
        f"{prefix}weight_packed": torch.where(words >= 2**31, words - 2**32, words).to(torch.int32),
        f"{prefix}weight_scale": scale.squeeze(2).to(torch.bfloat16),
        f"{prefix}weight_shape": torch.tensor([outputs, inputs]),
    }


def description(form: str) -> dict[str, Any]:
    """The quantization_config that says so."""
    common = {"type": "int", "symmetric": True}
    whole = form == "w8a8"
    weights = {**common, "num_bits": 8, "strategy": "channel", "dynamic": False}
    if not whole:
        weights |= {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    inputs = {**common, "num_bits": 8, "strategy": "token", "dynamic": True} if whole else None
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "int-quantized" if whole else "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
    }


if __name__ == "__main__":
    main()
