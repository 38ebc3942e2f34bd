"""Shapes of released models: config.json contents for random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PREFIX = "shape:"  # prefix of a model argument that selects one of SHAPES


def _config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
        **fields,
    }


_SCALED_ROPE = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip

_YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _config(
        "llama", "LlamaForCausalLM", hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_theta=100000.0, attention_bias=False,
    ),
    "qwen3-0.6b": _config(
        "qwen3", "Qwen3ForCausalLM", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        max_position_embeddings=40960, rope_theta=1e6, attention_bias=False,
    ),
    "llama-3.2-1b": _config(
        "llama", "LlamaForCausalLM", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, vocab_size=128256,
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=_SCALED_ROPE,
        attention_bias=False,
    ),
    "qwen2.5-1.5b": _config(
        "qwen2", "Qwen2ForCausalLM", hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, vocab_size=151936, max_position_embeddings=131072,
        rope_theta=1e6,
    ),
    "qwen3-4b": _config(
        "qwen3", "Qwen3ForCausalLM", hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        max_position_embeddings=40960, rope_theta=1e6, attention_bias=False,
    ),
    "mistral-7b": _config(
        "mistral", "MistralForCausalLM", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=32768, max_position_embeddings=32768,
        rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, tie_word_embeddings=False,
    ),
    # Attention of DeepSeek-V2-Lite; all layers are dense, with the width of its first layer.
    "deepseek-v2-lite-dense": _config(
        "deepseek_v2", "DeepseekV2ForCausalLM", hidden_size=2048, intermediate_size=10944, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, vocab_size=102400, max_position_embeddings=163840, rope_theta=10000.0,
        rope_scaling=_YARN, first_k_dense_replace=27, tie_word_embeddings=False,
    ),
    "llama-2-7b": _config(
        "llama", "LlamaForCausalLM", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, vocab_size=32000, max_position_embeddings=4096,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
    ),
    "llama-2-13b": _config(
        "llama", "LlamaForCausalLM", hidden_size=5120, intermediate_size=13824, num_hidden_layers=40,
        num_attention_heads=40, num_key_value_heads=40, vocab_size=32000, max_position_embeddings=4096,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
    ),
    "llama-3-8b": _config(
        "llama", "LlamaForCausalLM", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
    ),
    "llama-3-70b": _config(
        "llama", "LlamaForCausalLM", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
    ),
    "llama-3.1-405b": _config(
        "llama", "LlamaForCausalLM", hidden_size=16384, intermediate_size=53248, num_hidden_layers=126,
        num_attention_heads=128, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
    ),
    "mixtral-8x7b": _config(
        "mixtral", "MixtralForCausalLM", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, max_position_embeddings=32768,
        rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, tie_word_embeddings=False, num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "deepseek-v3": _config(
        "deepseek_v3", "DeepseekV3ForCausalLM", hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, vocab_size=129280, max_position_embeddings=163840, rope_theta=10000.0,
        rope_scaling={**_YARN, "mscale": 1.0}, first_k_dense_replace=3, tie_word_embeddings=False,
        moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8,
        topk_group=4, routed_scaling_factor=2.5, norm_topk_prob=True, scoring_func="sigmoid",
        topk_method="noaux_tc",
    ),
}  # fmt: skip


def config(shape: str) -> dict[str, Any]:
    """config.json of a shape. Raises ValueError for an unknown one."""
    if shape not in SHAPES:
        raise ValueError(f"shape: {shape!r} is not one of {', '.join(SHAPES)}")
    return SHAPES[shape]


def write(shape: str, folder: Path) -> Path:
    """Write a folder with the config of a shape, for random weights. Raises ValueError for an unknown shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape)))
    return folder
