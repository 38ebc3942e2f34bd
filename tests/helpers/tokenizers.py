"""Tiny models with a tokenizer of their size: half of the bytes, no merges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from helpers.byte_tokenizer import CONTROL, byte_tokenizer, write_tokenizer
from helpers.checkpoints import VOCAB, TinyModel, save, tiny_model

Folder = Callable[..., Path]  # (name of a tiny model, dtype) -> its checkpoint folder


def save_whole(model: TinyModel | str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """`folder`, now with a tiny model, given or by name, of random weights and a tokenizer of its size."""
    save(tiny_model(model) if isinstance(model, str) else model, folder, dtype)
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """Byte-level tokens for ids 3 …; ids 0-2 are <pad>, <s>, </s>. Covers printable ASCII, space and newline."""
    write_tokenizer(folder, byte_tokenizer(most=VOCAB - len(CONTROL)))
