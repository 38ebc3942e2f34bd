"""Encoders whose code is on the hub and not in transformers: equal to their published definitions, written out here."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.backends import BACKENDS, Backend
from helpers.checkpoints import VOCAB
from helpers.encoders import pooled_rows, reference_row, save_encoder, texts, tiny_encoder, worst
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


def filled(model: nn.Module) -> nn.Module:
    """The model with random weights that leave no part without effect."""
    torch.manual_seed(7)
    for name, weight in model.named_parameters():
        scale = 0.3 if weight.ndim == 1 else 1.4 / weight.shape[-1] ** 0.5
        norm = "ln.weight" in name.lower() or "norm.weight" in name.lower()
        weight.data = scale * torch.randn(weight.shape) + (1.0 if norm else 0.0)
    return model.eval()


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def saved(folder: Path, config: dict[str, Any], model: nn.Module, prefix: str) -> tuple[Path, list[Any]]:
    """The folder of a model with random weights, and the mean hidden state of each text by its definition."""
    tensors = {f"{prefix}{name}": weight.data for name, weight in filled(model).named_parameters()}
    with torch.inference_mode():
        wanted = [model(ids).mean(0).numpy() for ids in texts()]
    return save(folder, config, tensors), wanted


@pytest.fixture(scope="module", params=[{"type": "ntk", "factor": 8.0}, None], ids=["ntk", "plain"])
def new_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    """A folder as on the hub, and the mean hidden state of each text by the definition."""
    config = CONFIG | {"rope_scaling": request.param}
    return saved(tmp_path_factory.mktemp("new"), config, NewModel(config), "new.")


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


JINA: dict[str, Any] = {
    "model_type": "bert", "architectures": ["JinaBertForMaskedLM"], "vocab_size": VOCAB, "hidden_size": 72,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 8192,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "position_embedding_type": "alibi",
    "feed_forward_type": "geglu", "emb_pooler": "mean", "torch_dtype": "float32", "pad_token_id": 0,
}  # fmt: skip


class JinaLayer(nn.Module):
    """A layer of jinaai/jina-bert-implementation: BERT's attention with ALiBi, and JinaBertGLUMLP."""

    def __init__(self, dim: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention = nn.ModuleDict({
            "self": nn.ModuleDict({name: nn.Linear(dim, dim) for name in ("query", "key", "value")}),
            "output": nn.ModuleDict({"dense": nn.Linear(dim, dim), "LayerNorm": nn.LayerNorm(dim, eps=1e-12)}),
        })  # fmt: skip
        self.mlp = nn.ModuleDict({
            "gated_layers": nn.Linear(dim, 2 * width, bias=False),
            "wo": nn.Linear(width, dim),
            "layernorm": nn.LayerNorm(dim, eps=1e-12),
        })  # fmt: skip

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.attention["self"][name](x).view(len(x), self.heads, -1).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        output = self.attention["output"]
        x = output["LayerNorm"](output["dense"](mixed) + x)
        gated, plain = self.mlp["gated_layers"](x).chunk(2, -1)
        return self.mlp["layernorm"](self.mlp["wo"](nn.functional.gelu(gated) * plain) + x)


class JinaBertModel(nn.Module):
    """JinaBertModel with ALiBi; six heads have the slopes of four, and two of those of eight."""

    slopes = (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dim = config["hidden_size"]
        self.embeddings = nn.ModuleDict({
            "word_embeddings": nn.Embedding(config["vocab_size"], dim),
            "token_type_embeddings": nn.Embedding(2, dim),
            "LayerNorm": nn.LayerNorm(dim, eps=1e-12),
        })  # fmt: skip
        layer = (dim, config["num_attention_heads"], config["intermediate_size"])
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(JinaLayer(*layer) for _ in range(config["num_hidden_layers"]))}
        )

    def forward(self, ids: list[int]) -> torch.Tensor:
        x = (
            self.embeddings["word_embeddings"](torch.tensor(ids))
            + self.embeddings["token_type_embeddings"].weight[0]
        )
        x, at = self.embeddings["LayerNorm"](x), torch.arange(len(ids))
        bias = -torch.tensor(self.slopes)[:, None, None] * (at[:, None] - at[None, :]).abs()
        for layer in self.encoder["layer"]:
            x = layer(x, bias)
        return x


@pytest.fixture(scope="module")
def jina_bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    return saved(tmp_path_factory.mktemp("jina"), JINA, JinaBertModel(JINA), "bert.")


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_jina_bert(backend: Backend, jina_bert: tuple[Path, list[Any]]) -> None:
    """On every instruction set, with batches that change no bit, and an int8 cache close to it."""
    folder, wanted = jina_bert
    found = pooled_rows(folder, backend, [range(6)], F32)
    assert worst(found, wanted) <= 4e-5
    alone = pooled_rows(folder, backend, [[0], [3, 5]], F32, seed=4)
    assert backend.name == "torch" or all(np.array_equal(found[number], row) for number, row in alone.items())
    assert worst(pooled_rows(folder, backend, [range(6)], replace(F32, kv="i8")), wanted) <= 0.05


def test_without_alibi_the_rows_are_others(
    jina_bert: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr("quire.executor.torch.ops.alibi_slopes", torch.zeros)
    folder, wanted = jina_bert
    torch_backend = next(backend for backend in BACKENDS if backend.name == "torch")
    assert worst(pooled_rows(folder, torch_backend, [range(6)], F32), wanted) > 0.05


FLASH = {
    "embeddings.LayerNorm": "emb_ln",
    "attention.output.dense": "mixer.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}


def test_the_hub_s_names_of_xlm_roberta(tmp_path: Path) -> None:
    """jina-reranker-v2: the numbers of transformers' class, with tensors named and packed as its own code has them."""
    model = tiny_encoder("xlm-roberta-score")
    theirs = save_encoder(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        at, _, part = name.partition(".attention.self.")
        if part:
            if part.startswith("query"):
                packed = [tensors[f"{at}.attention.self.{x}.{part[6:]}"] for x in ("query", "key", "value")]
                renamed[f"{at}.mixer.Wqkv.{part[6:]}"] = torch.cat(packed)
            continue
        renamed[reduce(lambda known, pair: known.replace(*pair), FLASH.items(), name)] = weight
    renamed = {
        name.replace(".encoder.layer.", ".encoder.layers."): weight for name, weight in renamed.items()
    }
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "use_flash_attn": True,
        "lora_adaptations": None,
    }
    save(tmp_path, config, renamed)
    wanted = [reference_row(model, theirs, ids) for ids in texts()]
    assert worst(pooled_rows(tmp_path, BACKENDS[0], [range(6)], F32), wanted) <= 4e-5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_name_or_path", "jinaai/jina-bert-v2-qk-post-norm"),
        ("auto_map", {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}),
        ("feed_forward_type", "original"),
    ],
)
def test_other_variants_of_jina_bert_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        read_spec(ConfigReader(JINA | {key: value}, "config.json"))


def test_adapters_inside_of_a_checkpoint_are_refused() -> None:
    """jina-embeddings-v3 as its own code has it."""
    config = {
        "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "use_flash_attn": True, "hidden_size": 64,
        "position_embedding_type": "rotary", "lora_adaptations": ["retrieval.query"],
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="lora_adaptations"):
        read_spec(ConfigReader(config, "config.json"))
