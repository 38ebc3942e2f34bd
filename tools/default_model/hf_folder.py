"""Model folders in Hugging Face format: config.json, model.safetensors, tokenizer files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from . import tokenizer as tokenizers
from .model import Decoder
from .rendering import END_OF_TEXT, IM_END
from .shape import shape_from_config

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def save(model: Decoder, folder: Path, tokenizer_folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a folder that transformers and Quire load unchanged. The tied output matrix is written once."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if tokenizer_folder.resolve() != folder.resolve():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    vocabulary = tokenizers.load(folder)
    config = model.shape.config(*(tokenizers.id_of(vocabulary, t) for t in (IM_END, END_OF_TEXT)))
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {f"model.{k}": v.to(dtype).cpu().contiguous() for k, v in model.state_dict().items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def load(folder: Path, device: str = "cpu") -> Decoder:
    """The model of a folder, in float32."""
    model = Decoder(shape_from_config(json.loads((folder / "config.json").read_text())))
    weights = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in weights.items()})
    model.to(device).eval()
    return model
