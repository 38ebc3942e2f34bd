"""The checkpoint of a trained draft, in the layout that is published for its method."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.engine.build.opening import Model
from quire.loader.draft_checkpoint import MEDUSA
from quire.loader.safetensors_writer import write_safetensors
from quire.loader.source import Array, TensorInfo
from quire.spec.draft import Features
from quire.train.heads import Chain, Eagle, Eagle3, LayerShape, Medusa, SmallModel

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
              "chat_template.jinja")  # fmt: skip


def write_draft(draft: Chain, model: Model, features: Features | None, name: str, out: Path) -> None:
    """Write a draft for a model that was opened by `name` to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    file, state = "model.safetensors", draft.state_dict()
    if isinstance(draft, Medusa):
        file = MEDUSA
        state = {key.removeprefix("medusa_head."): value for key, value in state.items()}
        config: dict[str, Any] = {
            "medusa_num_heads": len(draft.medusa_head), "medusa_num_layers": 1, "original_lm_head": True,
            "base_model_name_or_path": name, "hidden_size": model.facts.spec.dim, "vocab_size": model.facts.spec.vocab,
        }  # fmt: skip
    elif isinstance(draft, Eagle3):
        config = _layer_config(draft.shape, model) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_aux_hidden_state_layer_ids": list(features.layers if features else ()),
        }
        if draft.ids is not None:
            config["draft_vocab_size"] = len(draft.ids)
            state["d2t"] = draft.ids - torch.arange(len(draft.ids))
    elif isinstance(draft, Eagle):
        config = _layer_config(draft.shape, model) | {"bias": True}
    elif isinstance(draft, SmallModel):
        config = _layer_config(draft.shape, model) | {
            "num_hidden_layers": len(draft.layers), "tie_word_embeddings": True
        }  # fmt: skip
        state = {f"model.{key}": value for key, value in state.items()}
        for kept in _TOKENIZER:
            if (model.folder / kept).is_file():
                shutil.copyfile(model.folder / kept, out / kept)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write(out / file, state)


def _layer_config(shape: LayerShape, model: Model) -> dict[str, Any]:
    spec = model.facts.spec
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.dim,
        "intermediate_size": shape.width, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "num_hidden_layers": 1, "vocab_size": spec.vocab,
        "rms_norm_eps": shape.norm.eps, "rope_theta": shape.rope.theta, "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip


def _write(path: Path, state: Mapping[str, Tensor]) -> None:
    """In bfloat16; whole numbers as they are."""
    infos = [
        TensorInfo(key, "BF16" if value.is_floating_point() else "I64", tuple(value.shape))
        for key, value in state.items()
    ]

    def stored(info: TensorInfo) -> Iterable[Array]:
        value = state[info.name]
        yield (
            value.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            if info.dtype == "BF16"
            else value.numpy()
        )

    write_safetensors(path, infos, stored)
