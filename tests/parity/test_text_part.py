"""A checkpoint with an image tower, read as its language model: equal to transformers on text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.backends import BACKENDS, Backend
from helpers.checkpoints import random_tokens
from helpers.runs import MIXED, run_steps
from helpers.specs import F32
from quire.spec.facts import read_model

TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 16,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("with-images")
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_index=127
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "language_model" in name:
                weight.copy_(
                    torch.randn(weight.shape) * (0.25 if "norm" in name else weight.shape[-1] ** -0.5)
                )
    model.save_pretrained(folder)
    return folder, model


def expected(model: Any, seed: int) -> np.ndarray:
    """Logits of text alone; the image token's id is not in it."""
    tokens = torch.tensor([random_tokens(seed)])
    hidden = model.model.language_model(input_ids=tokens, use_cache=False).last_hidden_state
    with torch.inference_mode():
        return model.lm_head(hidden)[0].numpy()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_text_equals_transformers(saved: tuple[Path, Any], backend: Backend) -> None:
    folder, model = saved
    assert any("image tower" in notice for notice in read_model(folder).notices)
    with torch.inference_mode():
        for seed, logits in enumerate(run_steps(folder, backend, MIXED, F32)):
            assert np.abs(logits - expected(model, seed)[: len(logits)]).max() <= backend.tolerance


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_both_namings_are_read(saved: tuple[Path, Any], prefix: str, tmp_path: Path) -> None:
    """Released checkpoints have one, transformers 5 may write the other."""
    folder, model = saved
    tensors = load_file(folder / "model.safetensors")
    language = {name for name in tensors if "language_model" in name}
    assert len(language) == len(tensors) - sum("vision_tower" in n or "projector" in n for n in tensors)
    stems = {name: name.split("language_model.")[1].removeprefix("model.") for name in language}
    renamed = {prefix + stems[n] if n in language else n: tensor for n, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (logits, *_) = run_steps(tmp_path, BACKENDS[0], [{0: 20}], F32)
    with torch.inference_mode():
        assert np.abs(logits - expected(model, 0)[:20]).max() <= 1e-5
