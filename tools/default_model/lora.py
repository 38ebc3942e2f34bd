"""Low-rank adapters (Hu et al. 2021) for the trained model, and their folders in PEFT format."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .model import Decoder

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 8
ALPHA = 16
_PREFIX = "base_model.model.model."


class LoraLinear(nn.Module):
    """A frozen linear layer plus B·A·x scaled by alpha / rank."""

    def __init__(self, base: nn.Linear, rank: int = RANK, alpha: int = ALPHA) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x)) * self.scale


def attach(model: Decoder, generator: torch.Generator) -> None:
    """Freeze the model and put an adapter on every projection."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rsplit(".", 1)[-1] in TARGETS and isinstance(module, nn.Linear):
            parent = model.get_submodule(name.rsplit(".", 1)[0])
            layer = LoraLinear(module)
            nn.init.kaiming_uniform_(layer.lora_A.weight, a=math.sqrt(5), generator=generator)
            setattr(parent, name.rsplit(".", 1)[1], layer)


def save(model: Decoder, folder: Path, base: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write adapter_config.json and adapter_model.safetensors. `base` names the model it belongs to."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        _PREFIX + name: value.to(dtype).cpu().contiguous()
        for name, value in model.state_dict().items()
        if ".lora_" in name
    }
    save_file(weights, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": sorted(TARGETS),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def merge(model: Decoder, folder: Path) -> None:
    """Add a saved adapter to the weights of a plain model."""
    weights = load_file(str(folder / "adapter_model.safetensors"))
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    for name, a in weights.items():
        if ".lora_A." not in name:
            continue
        b = weights[name.replace(".lora_A.", ".lora_B.")]
        module = model.get_submodule(name.removeprefix(_PREFIX).removesuffix(".lora_A.weight"))
        assert isinstance(module, nn.Linear)
        with torch.no_grad():
            module.weight += scale * (b.float() @ a.float())
