"""Adapters that answer with a token of their own, whatever is asked, and a base that they are for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from helpers.adapters import peft_folder
from helpers.server import served_folder
from quire.lora.adapter import F32

_LAST = "model.layers.1.self_attn"
_WIDTH = 64


def naming_base(folder: Path) -> Path:
    """`folder`, now with a tiny model whose hidden states have a feature, the first, that is always large."""
    served_folder(folder)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].copy()
    embedding[:, 0] = 4 * np.abs(embedding).max()
    save_file(
        {**weights, "model.embed_tokens.weight": embedding},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def naming_adapter(folder: Path, base: Path, token: int, *, rank: int = 2) -> Path:
    """`folder`, now an adapter with which every next token is `token`.

    The values of the last layer become that feature, so their mean is the same for every prompt; the output of its
    attention becomes the direction of the token's row in the head.
    """
    weights = load_file(base / "model.safetensors")
    row: F32 = weights["lm_head.weight"][token] * weights["model.norm.weight"]
    values = weights[f"{_LAST}.v_proj.weight"].shape[0]
    a = np.zeros((rank, _WIDTH), np.float32), np.zeros((rank, _WIDTH), np.float32)
    a[0][0, 0] = a[1][0, 0] = 1.0
    b = np.zeros((values, rank), np.float32), np.zeros((_WIDTH, rank), np.float32)
    b[0][0, 0] = 100.0
    b[1][:, 0] = 100.0 * row / np.linalg.norm(row)
    tensors = {
        f"base_model.model.{_LAST}.{module}.lora_{part}.weight": matrix
        for number, module in enumerate(("v_proj", "o_proj"))
        for part, matrix in (("A", a[number]), ("B", b[number]))
    }
    return peft_folder(folder, tensors, r=rank, lora_alpha=rank)
