"""Tiny drafts in the layouts that are published, and what they compute, written from the papers in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from helpers.checkpoints import VOCAB

DIM, HEADS, KV_HEADS, WIDTH, THETA, EPS = 64, 4, 2, 80, 20_000.0, 1e-5
DRAFT_VOCAB = 40
HEAD_DIM = DIM // HEADS
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": DIM, "intermediate_size": WIDTH,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "vocab_size": VOCAB,
    "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 256, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Passed:
    """What a pass over one sequence leaves of every token."""

    logits: Tensor
    hidden: Tensor


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            found[name] = 1 + 0.25 * noise
        else:
            found[name] = 0.3 * noise if name.endswith("bias") else 1.3 * noise / shape[-1] ** 0.5
    return found


def _write(
    folder: Path, config: Mapping[str, Any], weights: Weights, file: str = "model.safetensors"
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / file)
    return folder


def layer_shapes(prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    own = f"{prefix}.self_attn"
    return {
        f"{own}.q_proj.weight": (DIM, inputs), f"{own}.k_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{own}.v_proj.weight": (KV_HEADS * HEAD_DIM, inputs), f"{own}.o_proj.weight": (DIM, DIM),
        f"{prefix}.mlp.gate_proj.weight": (WIDTH, DIM), f"{prefix}.mlp.up_proj.weight": (WIDTH, DIM),
        f"{prefix}.mlp.down_proj.weight": (DIM, WIDTH), f"{prefix}.post_attention_layernorm.weight": (DIM,),
    }  # fmt: skip


def write_eagle(folder: Path, **config: Any) -> Path:
    """As yuhuili/EAGLE-LLaMA3-Instruct-8B, with a bias of fc as in yuhuili/EAGLE-Vicuna-7B-v1.3; two layers."""
    shapes = {"embed_tokens.weight": (VOCAB, DIM), "fc.weight": (DIM, 2 * DIM), "fc.bias": (DIM,)}
    shapes |= layer_shapes("layers.0", DIM) | layer_shapes("layers.1", DIM)
    shapes |= {"layers.1.input_layernorm.weight": (DIM,)}
    return _write(folder, _LLAMA | {"num_hidden_layers": 2} | config, random_weights(shapes))


def write_eagle3(folder: Path, **config: Any) -> Path:
    """As yuhuili/EAGLE3-LLaMA3.1-Instruct-8B and AngelSlim/Qwen3-8B_eagle3."""
    shapes = {"fc.weight": (DIM, 3 * DIM), "norm.weight": (DIM,), "lm_head.weight": (DRAFT_VOCAB, DIM)}
    shapes |= layer_shapes("midlayer", 2 * DIM)
    shapes |= {"midlayer.input_layernorm.weight": (DIM,), "midlayer.hidden_norm.weight": (DIM,)}
    weights = random_weights(shapes)
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:DRAFT_VOCAB].sort().values
    weights["d2t"] = kept - torch.arange(DRAFT_VOCAB)
    weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
    more = {"draft_vocab_size": DRAFT_VOCAB, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    return _write(folder, _LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]} | more | config, weights)


def write_medusa(folder: Path, heads: int = 3, layers: int = 2, **config: Any) -> Path:
    """As FasterDecoding/medusa-vicuna-7b-v1.3, its pickle converted to safetensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for h in range(heads):
        for at in range(layers):
            shapes |= {f"{h}.{at}.linear.weight": (DIM, DIM), f"{h}.{at}.linear.bias": (DIM,)}
        if not config.get("original_lm_head"):
            shapes[f"{h}.{layers}.weight"] = (VOCAB, DIM)
    given = {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "a/target"}
    return _write(folder, given | config, random_weights(shapes), "medusa_lm_head.safetensors")


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


# ---- definitions --------------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor) -> Tensor:
    """x [T, heads, D] turned by its position, in halves (2104.09864)."""
    angles = torch.arange(len(x))[:, None] * THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(w: Weights, prefix: str, x: Tensor) -> Tensor:
    q, k, v = ((x @ w[f"{prefix}.{n}_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM)) for n in "qkv")
    q, k = rotated(q), rotated(k)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w[f"{prefix}.o_proj.weight"].T


def block(w: Weights, prefix: str, residual: Tensor, mixer_input: Tensor) -> Tensor:
    residual = residual + attention(w, f"{prefix}.self_attn", mixer_input)
    x = rms(residual, w[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = (x @ w[f"{prefix}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return residual + (functional.silu(gate) * up) @ w[f"{prefix}.mlp.down_proj.weight"].T


def eagle(w: Weights, target: Weights, tokens: Tensor, features: Tensor) -> Passed:
    """2401.15077: one linear over the embedding of the next token and the feature, then layers whose first has no
    norm of its input; the target's head."""
    x = torch.cat([target["model.embed_tokens.weight"][tokens], features], -1)
    x = x @ w["fc.weight"].T + w["fc.bias"]
    x = block(w, "layers.0", x, x)
    if "layers.1.input_layernorm.weight" in w:
        x = block(w, "layers.1", x, rms(x, w["layers.1.input_layernorm.weight"]))
    return Passed(x @ target["lm_head.weight"].T, x)


def eagle3(w: Weights, target: Weights, tokens: Tensor, features: Tensor) -> Passed:
    """2503.01840: three features become one; a layer over [embedding, feature], each normed; a head of its own. Rows
    that are as wide as the draft are its own, and need not become one."""
    x = features if features.shape[1] == DIM else features @ w["fc.weight"].T
    embedded = rms(target["model.embed_tokens.weight"][tokens], w["midlayer.input_layernorm.weight"])
    x = block(w, "midlayer", x, torch.cat([embedded, rms(x, w["midlayer.hidden_norm.weight"])], -1))
    return Passed(rms(x, w["norm.weight"]) @ w["lm_head.weight"].T, x)


def medusa(w: Weights, target: Weights, features: Tensor, heads: int = 3, layers: int = 2) -> Tensor:
    """2401.10774: logits [T, heads, vocabulary]."""
    found = []
    for h in range(heads):
        x = features
        for at in range(layers):
            x = x + functional.silu(x @ w[f"{h}.{at}.linear.weight"].T + w[f"{h}.{at}.linear.bias"])
        found.append(x @ w.get(f"{h}.{layers}.weight", target["lm_head.weight"]).T)
    return torch.stack(found, 1)


Definition = Callable[[Weights, Weights, Tensor, Tensor], Passed]


def write_mtp(folder: Path, reference: Any, source: Path, modules: int = 1) -> list[Any]:
    """The checkpoint `source` of `reference`, a transformers model, with layers for multi-token prediction as
    deepseek-ai/DeepSeek-V3 and zai-org/GLM-4.5 have one. Returns the layers of transformers in them."""
    stored = load_file(source / "model.safetensors")
    weights, layers = dict(stored), []
    for at in range(len(reference.model.layers), len(reference.model.layers) + modules):
        layer = type(reference.model.layers[-1])(reference.config, at).float().eval()
        shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
        own = f"model.layers.{at}"
        shapes |= {"eh_proj.weight": (DIM, 2 * DIM)} | {f"{n}.weight": (DIM,) for n in _MTP_NORMS}
        weights |= {f"{own}.{name}": t for name, t in random_weights(shapes, seed=at).items()}
        layer.load_state_dict({n: weights[f"{own}.{n}"] for n in layer.state_dict()})
        weights[f"{own}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        weights[f"{own}.shared_head.head.weight"] = stored["lm_head.weight"].clone()
        layers.append(layer)
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": modules}
    _write(folder, config, weights)
    return layers


_MTP_NORMS = ("enorm", "hnorm", "shared_head.norm")


def mtp(layer: Any, reference: Any, w: Weights, tokens: Tensor, features: Tensor, module: int = 0) -> Passed:
    """2412.19437, section 2.2: the normed embedding of the next token and the normed row become one; a layer of the
    model's own kind; a norm, and the head. Module k: of the token 1 + k behind, and the row of the module before."""
    at, eps = len(reference.model.layers) + module, reference.config.rms_norm_eps

    def normed(name: str, x: Tensor) -> Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w[f"model.layers.{at}.{name}.weight"]
        )

    x = torch.cat([normed("enorm", w["model.embed_tokens.weight"][tokens]), normed("hnorm", features)], -1)
    x = (x @ w[f"model.layers.{at}.eh_proj.weight"].T)[None]
    positions = torch.arange(len(tokens))[None]
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
    with torch.inference_mode():
        angles = reference.model.rotary_emb(x, positions)
        x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
    x = normed("shared_head.norm", (x[0] if isinstance(x, tuple) else x).reshape(-1, DIM))
    return Passed(x @ w["lm_head.weight"].T, x)
