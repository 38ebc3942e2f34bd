"""A tokenizer small enough for the tiny models: half of the bytes, no merges."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from helpers.checkpoints import VOCAB, TinyModel, save, tiny_model

Folder = Callable[..., Path]  # (name of a tiny model, dtype) -> its checkpoint folder

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def save_whole(model: TinyModel | str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """`folder`, now with a tiny model, given or by name, of random weights and a tokenizer of its size."""
    save(tiny_model(model) if isinstance(model, str) else model, folder, dtype)
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """Byte-level tokens for ids 3 …; ids 0-2 are <pad>, <s>, </s>. Covers printable ASCII, space and newline."""
    space_and_newline = ["\u0120", "\u010a"]
    printable = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c not in space_and_newline]
    alphabet = [*space_and_newline, *printable][: VOCAB - 3]
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "pad_token": "<pad>", "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
