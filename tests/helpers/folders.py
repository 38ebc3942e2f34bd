"""Checkpoint folders of random weights, made without torch: a Llama of any size, in one or more shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.weight_files import write, write_shards
from quire.loader import RandomWeights
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.spec.facts import read_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}  # fmt: skip


def llama_folder(path: Path, *, seed: int = 0, shards: int = 1, **overrides: Any) -> Path:
    """A folder with config.json and bfloat16 weights; no tokenizer, so it works on token ids."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | overrides))
    params = lower(read_model(path).spec, NumberFormats("bf16", "bf16")).params
    source = RandomWeights(params, seed)
    tensors = {name: source.read(name) for name in source.names()}
    if shards == 1:
        write(path / "model.safetensors", tensors)
    else:
        names = list(tensors)
        write_shards(path, [{name: tensors[name] for name in names[i::shards]} for i in range(shards)])
    return path
