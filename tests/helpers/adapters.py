"""Adapter files for tests, right and wrong: PEFT folders and GGUF adapters of random numbers, and specs they fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.weight_files import write
from quire.loader.gguf_writer import OutTensor, write_gguf
from quire.spec import ModelSpec
from quire.spec.config_reader import ConfigReader
from quire.spec.facts import facts_of

RANK = 4
PREFIX = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"
_SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
_OTHERS: dict[str, dict[str, Any]] = {
    "llama": {}, "phi3": {}, "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {**_EXPERTS, "num_experts": 3, "moe_intermediate_size": 24},
    "gpt_oss": {**_EXPERTS, "num_local_experts": 3, "intermediate_size": 48, "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3": {"text_config": {**_SIZES, "model_type": "gemma3_text", "head_dim": 16}},
}  # fmt: skip


def base_spec(model_type: str = "llama", **changes: Any) -> ModelSpec:
    """A small model of the family."""
    config = {"model_type": model_type, **_SIZES, **_OTHERS[model_type], **changes}
    return facts_of(ConfigReader(config), None, "").spec


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pair(
    module: str, out: int = 64, inputs: int = 64, rank: int = RANK, seed: int = 0
) -> dict[str, np.ndarray]:
    """A and B of a module as PEFT names them."""
    return {
        f"{PREFIX}{module}.lora_A.weight": numbers(seed, rank, inputs),
        f"{PREFIX}{module}.lora_B.weight": numbers(seed + 1, out, rank),
    }


def peft_folder(
    folder: Path, tensors: Mapping[str, np.ndarray], *, name: str = "adapter_model.safetensors", **config: Any
) -> Path:
    """A folder with these tensors; `config` changes adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "base_model_name_or_path": "base"} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    write(folder / name, tensors)
    return folder


def gguf_adapter(path: Path, tensors: Mapping[str, np.ndarray], **metadata: Any) -> Path:
    """A GGUF adapter with these tensors, in F32; `metadata` by key, dots as two underscores, None to leave one out."""
    values = {
        "general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 6.0,
    } | {key.replace("__", "."): value for key, value in metadata.items()}  # fmt: skip
    outs = [OutTensor(name, "F32", array.shape) for name, array in tensors.items()]
    given = {key: value for key, value in values.items() if value is not None}
    write_gguf(path, given, outs, lambda tensor: iter([tensors[tensor.name]]))
    return path
