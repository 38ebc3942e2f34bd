"""GGUF files for tests: byte by byte, right and wrong, and from the tiny checkpoints."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoints import TinyModel, rope_of, tiny_model
from quire.loader import Checkpoint, LoadRules
from quire.loader.gguf_writer import OutTensor, encode, write_gguf
from quire.quant.ggml import TYPE_IDS
from quire.spec.facts import read_model

STEMS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps", "block_sparse_moe.experts.w3": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "block_sparse_moe.experts.w2": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn": "attn_sinks",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
# Where a norm after attention has the name that others give the norm before the feed-forward.
_NORM_AFTER = {"gemma2", "gemma3", "olmo2", "gpt-oss"}
PERMUTED, WHOLE_NORMS = {"llama", "granite", "smollm3"}, {"gemma", "gemma2", "gemma3"}


_DEEPSEEK = {
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
# Tiny model, what differs from it, architecture.
MODELS: dict[str, tuple[str, dict[str, object], str]] = {
    "llama": ("llama2", {}, "llama"),
    "llama-linear": ("llama-linear", {}, "llama"),
    "llama-yarn": ("llama-yarn", {}, "llama"),
    "mistral": ("mistral-window", {"sliding_window": None}, "llama"),
    "qwen2": ("qwen2-tied", {}, "qwen2"),
    "qwen3": ("qwen3", {}, "qwen3"),
    "qwen3-biases-mha": ("qwen3-biases-mha", {}, "qwen3"),
    "gemma": ("gemma-mqa", {"hidden_act": "gelu_pytorch_tanh"}, "gemma"),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}, "gemma2"),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 24, "num_hidden_layers": 7, "layer_types": None}, "gemma3"),
    "phi3": ("phi3-window", {}, "phi3"),
    "phi3-longrope": ("phi4-partial-longrope", {}, "phi3"),
    "olmo2": ("olmo2", {}, "olmo2"),
    "olmo3": ("olmo3", {}, "olmo2"),
    "granite": ("granite", {}, "granite"),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}, "smollm3"),
    "glm": ("glm", {}, "chatglm"),
    "glm4": ("glm4", {}, "glm4"),
    "stablelm": ("stablelm", {}, "stablelm"),
    "stablelm-head-norms": ("stablelm-parallel-head-norms", {}, "stablelm"),
    "cohere": ("cohere", {}, "command-r"),
    "cohere-head-norms": ("cohere-head-norms", {}, "command-r"),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "layer_types": None}, "cohere2"),
    "deepseek2": ("deepseek2-lite", _DEEPSEEK | rope_of("yarn", factor=4.0, mscale=0.9, mscale_all_dim=0.9,
                                                           original_max_position_embeddings=32), "deepseek2"),
    "deepseek3": ("deepseek3", _DEEPSEEK | rope_of("default") | {"norm_topk_prob": True}, "deepseek2"),
    "mixtral": ("mixtral", {}, "llama"),
    "qwen2-moe": ("qwen2-moe-dense-layers", {"decoder_sparse_step": 1, "mlp_only_layers": []}, "qwen2moe"),
    "qwen3-moe": ("qwen3-moe", {"mlp_only_layers": []}, "qwen3moe"),
    "qwen3-moe-dense-layer": ("qwen3-moe", {}, "qwen3moe"),
    "gpt-oss": ("gpt-oss", {"swiglu_limit": 7.0}, "gpt-oss"),
}  # fmt: skip


def made_model(name: str) -> TinyModel:
    """The tiny model of that line of MODELS."""
    base, changes, _ = MODELS[name]
    model = tiny_model(base)
    return TinyModel(f"gguf-{name}", model.config_class, dict(model.overrides) | changes)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """`shape` as the file has it: innermost first."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *(size % 2**64 for size in shape))
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def raw(
    metadata: Mapping[str, Any] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int | None, int | None] = (None, None),
    alignment: int = 32,
) -> bytes:
    """A file; values given as bytes are written as they are (type included). `counts`: of tensors, entries."""
    metadata, tensors = metadata or {}, tensors or []
    head = struct.pack(
        "<4sIQQ", b"GGUF", version,
        len(tensors) if counts[0] is None else counts[0],
        len(metadata) if counts[1] is None else counts[1],
    )  # fmt: skip
    for key, value in metadata.items():
        head += string(key) + (value if isinstance(value, bytes) else encode(value))
    head += b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data if data or tensors else head


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (half, pair) to (pair, half), as converters do for the llama architecture."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def gguf_name(name: str, arch: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> blk.0.attn_q.weight"""
    stem, _, suffix = name.rpartition(".")
    if stem in STEMS:
        return f"{STEMS[stem]}.{suffix}"
    if suffix == "sinks":
        suffix = "weight"
    if suffix == "e_score_correction_bias":
        layer = stem.split(".")[2]
        return f"blk.{layer}.exp_probs_b.bias"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    if part == "post_attention_layernorm" and arch in _NORM_AFTER:
        return f"blk.{layer}.post_attention_norm.{suffix}"
    return f"blk.{layer}.{STEMS[part]}.{suffix}"


def metadata_of(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """What a converter writes for a config.json."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get("full_attention", ropes)
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    found: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * part),
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
    }  # fmt: skip
    if "layer_norm_eps" in config:
        found["attention.layer_norm_epsilon"] = float(config["layer_norm_eps"])
    else:
        found["attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    if rope.get("rope_type") in {"linear", "yarn"}:
        found["rope.scaling.type"] = rope["rope_type"]
        found["rope.scaling.factor"] = rope["factor"]
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    found |= _more(config, rope, arch) | _experts(config, arch) | _latent(config)
    return {f"{arch}.{key}": value for key, value in found.items()} | {
        "general.architecture": arch, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip


def _more(config: Mapping[str, Any], rope: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """The keys of some architectures."""
    found: dict[str, Any] = {}
    if arch in {"gemma2", "gemma3", "olmo2", "cohere2", "phi3", "gpt-oss"} and "sliding_window" in config:
        found["attention.sliding_window"] = config["sliding_window"] or 0
        if arch == "olmo2":
            kinds = config["layer_types"]
            found["attention.sliding_window_pattern"] = np.array([kind[0] == "s" for kind in kinds])
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "use_parallel_residual"):
        if config.get(key) is not None:
            found[key] = config[key]
    for name, key in (
        ("embedding_multiplier", "embedding_scale"), ("residual_multiplier", "residual_scale"),
        ("attention_multiplier", "attention.scale"), ("logits_scaling", "logit_scale"),
    ):  # fmt: skip
        if name in config:
            found[key] = float(config[name])
    if "original_max_position_embeddings" in rope and rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        found["rope.scaling.original_context_length"] = original
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return found


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    if "kv_lora_rank" not in config:
        return {}
    rank, rope, rotated = config["kv_lora_rank"], config["rope_parameters"], config["qk_rope_head_dim"]
    found = {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": rank, "attention.key_length": rank + rotated,
        "attention.value_length": rank, "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"], "rope.dimension_count": rotated,
        "expert_count": config["n_routed_experts"], "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"], "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config.get("norm_topk_prob")),
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
    }  # fmt: skip
    if config.get("n_group"):
        found |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    if config["q_lora_rank"]:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if "mscale_all_dim" in rope:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def _experts(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    count = config.get("num_experts", config.get("num_local_experts"))
    if not count:
        return {}
    found = {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
    for name, key in (
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ):
        if name in config:
            found[key] = config[name]
    if arch == "gpt-oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    return found


def write_model(
    folder: Path, out: Path, arch: str, *, fuse: bool = False, half: bool = False, **more: Any
) -> Path:
    """The float32 checkpoint of `folder` as a GGUF file in F32, with further metadata.

    `fuse`: q, k and v in one tensor, gates and ups of experts in one, as options of converters write them.
    `half`: matrices in F16.
    """
    config = json.loads((folder / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    with Checkpoint(folder) as checkpoint:
        source = LoadRules.of(read_model(folder).spec).view(checkpoint)  # experts by themselves
        found = {name: np.array(source.read(name)) for name in source.names()}
    for name, weight in _stacked(found).items():
        target = gguf_name(name, arch)
        part = target.split(".")[-2]
        if part == "attn_kv_b":
            heads_up = weight.reshape(config["num_attention_heads"], -1, weight.shape[1])
            keys, values = np.split(heads_up, [config["qk_nope_head_dim"]], axis=1)
            tensors[target.replace("kv_b", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            tensors[target.replace("kv_b", "v_b")] = np.ascontiguousarray(values)
            continue
        if part == "ffn_gate_inp_shexp":
            tensors[target] = weight[0]
            continue
        plus = np.float32(arch in WHOLE_NORMS and "norm" in part)
        permuted = arch in PERMUTED and part in heads
        tensors[target] = permute(weight, heads[part]) if permuted else weight + plus
    if fuse:
        tensors = _fused(tensors)
    rope = config.get("rope_parameters") or {}
    for which in ("long", "short"):
        if rope.get("rope_type") == "longrope":
            tensors[f"rope_factors_{which}.weight"] = np.array(rope[f"{which}_factor"], np.float32)
    if half:
        tensors = {name: t.astype(np.float16) if t.ndim > 1 else t for name, t in tensors.items()}
    write_arrays(out, metadata_of(config, arch) | more, tensors)
    return out


def _fused(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = dict(tensors)
    for name in tensors:
        for whole, parts, axis in (
            ("attn_qkv", ("attn_q", "attn_k", "attn_v"), 0),
            ("ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps"), 1),
        ):
            blk, _, ending = name.partition(f".{parts[0]}.")
            if ending:
                pieces = [found.pop(f"{blk}.{part}.{ending}") for part in parts]
                found[f"{blk}.{whole}.{ending}"] = np.concatenate(pieces, axis)
    return found


def _stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Norms of single heads, `….norms.3.weight`, and experts, `….experts.3.w1.weight`, as one tensor."""
    found: dict[str, np.ndarray] = {}
    together: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        match = re.fullmatch(r"(.+)(?:\.norms|(\.experts))\.(\d+)(\..+)", name)
        if match is None:
            found[name] = array
        else:
            together.setdefault(match[1] + (match[2] or "") + match[4], {})[int(match[3])] = array
    return found | {name: np.stack([each[n] for n in range(len(each))]) for name, each in together.items()}


def write_arrays(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Tensors as F32, F16, or uint8 arrays [rows, row bytes] given as (type name, array)."""
    kinds = {"float32": "F32", "float16": "F16"}
    out = [OutTensor(name, kinds[array.dtype.name], array.shape) for name, array in tensors.items()]
    write_gguf(path, metadata, out, lambda tensor: [tensors[tensor.name]])
    return path


def type_id(name: str) -> int:
    return TYPE_IDS[name]
