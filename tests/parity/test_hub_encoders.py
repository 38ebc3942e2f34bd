"""Encoders whose code is on the hub and not in transformers: equal to their published definitions, written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from helpers.backends import BACKENDS, Backend
from helpers.checkpoints import VOCAB
from helpers.encoders import pooled_rows, texts, worst
from helpers.specs import F32
from quire.spec.config_reader import ConfigReader
from quire.spec.families import read_spec
from quire.types import UnsupportedModelError

CONFIG: dict[str, Any] = {
    "model_type": "new", "architectures": ["NewModel"], "vocab_size": VOCAB, "hidden_size": 48,
    "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64,
    "type_vocab_size": 1, "hidden_act": "gelu", "layer_norm_type": "layer_norm", "layer_norm_eps": 1e-12,
    "position_embedding_type": "rope", "rope_theta": 20000, "rope_scaling": {"type": "ntk", "factor": 8.0},
    "logn_attention_scale": False, "logn_attention_clip1": False, "pack_qkv": True, "unpad_inputs": False,
    "use_memory_efficient_attention": False, "torch_dtype": "float32", "pad_token_id": 0,
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
}  # fmt: skip


class NewLayer(nn.Module):
    """A layer of Alibaba-NLP/new-impl, modeling.py: packed projections, gated feed-forward, norms after sums."""

    def __init__(self, dim: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention = nn.ModuleDict({"qkv_proj": nn.Linear(dim, 3 * dim), "o_proj": nn.Linear(dim, dim)})
        self.mlp = nn.ModuleDict(
            {"up_gate_proj": nn.Linear(dim, 2 * width, bias=False), "down_proj": nn.Linear(width, dim)}
        )
        self.attn_ln, self.mlp_ln = nn.LayerNorm(dim, eps=1e-12), nn.LayerNorm(dim, eps=1e-12)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.view(len(x), self.heads, -1).transpose(0, 1)
            for part in self.attention["qkv_proj"](x).chunk(3, -1)
        )
        q, k = (
            part * cos + torch.cat((-part.chunk(2, -1)[1], part.chunk(2, -1)[0]), -1) * sin for part in (q, k)
        )
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        x = self.attn_ln(x + self.attention["o_proj"](mixed))
        up, gate = self.mlp["up_gate_proj"](x).chunk(2, -1)
        return self.mlp_ln(x + self.mlp["down_proj"](nn.functional.gelu(gate) * up))


class NewModel(nn.Module):
    """NewModel of Alibaba-NLP/new-impl, with NTKScalingRotaryEmbedding without mixed_b."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, dim = config, config["hidden_size"]
        self.embeddings = nn.ModuleDict({
            "word_embeddings": nn.Embedding(config["vocab_size"], dim),
            "token_type_embeddings": nn.Embedding(1, dim),
            "LayerNorm": nn.LayerNorm(dim, eps=1e-12),
        })  # fmt: skip
        layer = (dim, config["num_attention_heads"], config["intermediate_size"])
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(NewLayer(*layer) for _ in range(config["num_hidden_layers"]))}
        )

    def angles(self, count: int) -> torch.Tensor:
        dim, base = (
            self.config["hidden_size"] // self.config["num_attention_heads"],
            self.config["rope_theta"],
        )
        scaling = self.config["rope_scaling"]
        factor = scaling["factor"] if scaling else 1.0
        frequencies = 1.0 / ((base * factor) ** (torch.arange(0, dim, 2).float() / dim)) / factor ** (2 / dim)
        angles = torch.outer(torch.arange(count).float(), frequencies)
        return torch.cat((angles, angles), -1)

    def forward(self, ids: list[int]) -> torch.Tensor:
        x = (
            self.embeddings["word_embeddings"](torch.tensor(ids))
            + self.embeddings["token_type_embeddings"].weight[0]
        )
        x, angles = self.embeddings["LayerNorm"](x), self.angles(len(ids))
        for layer in self.encoder["layer"]:
            x = layer(x, angles.cos(), angles.sin())
        return x


@pytest.fixture(scope="module", params=[{"type": "ntk", "factor": 8.0}, None], ids=["ntk", "plain"])
def new_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    """A folder as on the hub, and the mean hidden state of each text by the definition."""
    config = CONFIG | {"rope_scaling": request.param}
    torch.manual_seed(7)
    model = NewModel(config).eval()
    for name, weight in model.named_parameters():
        scale = 0.3 if weight.ndim == 1 else 1.4 / weight.shape[-1] ** 0.5
        weight.data = scale * torch.randn(weight.shape) + (1.0 if "ln.weight" in name.lower() else 0.0)
    folder = tmp_path_factory.mktemp("new")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {f"new.{name}": weight.data for name, weight in model.named_parameters()},
        folder / "model.safetensors",
    )
    with torch.inference_mode():
        return folder, [model(ids).mean(0).numpy() for ids in texts()]


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_new_model(backend: Backend, new_model: tuple[Path, list[Any]]) -> None:
    folder, wanted = new_model
    assert 0.2 < max(np.abs(row).max() for row in wanted) < 8
    assert worst(pooled_rows(folder, backend, [range(6)], F32), wanted) <= 4e-5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pack_qkv", False),
        ("layer_norm_type", "rms_norm"),
        ("logn_attention_scale", True),
        ("position_embedding_type", "absolute"),
        ("rope_scaling", {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}),
    ],
)
def test_variants_of_the_hub_s_code_are_refused(key: str, value: Any) -> None:
    named = "mixed_b" if key == "rope_scaling" else key
    with pytest.raises(UnsupportedModelError, match=named):
        read_spec(ConfigReader(CONFIG | {key: value}, "config.json"))
