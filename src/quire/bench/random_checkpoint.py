"""Write checkpoints with random weights in files that every engine reads: config.json, model.safetensors, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.loader import RandomWeights
from quire.loader.safetensors_writer import write_safetensors
from quire.loader.source import Array, TensorInfo
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.spec.facts import read_model

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
PAIRS = (("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("o", "n"))
BLOCK_ROWS = 8192  # of a tensor in memory at once


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0, *, merges: bool = False) -> Path:
    """Write a folder that can be served: its text is nonsense, its speed that of the shape.

    `merges` adds a few tokens of several letters, without which some engines refuse the tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps({**ids, **config}, indent=1))
    write_tokenizer(folder, merges=merges)
    write_weights(folder, seed)
    return folder


def write_tokenizer(folder: Path, *, merges: bool = False, size: int = 0) -> None:
    """One token per byte, and three special tokens; with `merges` also a few pairs of letters.

    Up to `size` tokens, words follow that no text is divided into: nearly every token of a random answer then has text.
    """
    pairs = list(PAIRS) if merges else []
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)]
    tokens += [f"Ġword{i}" for i in range(len(tokens), size)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, bos, eos = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "bos_token": bos, "eos_token": eos
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def write_weights(folder: Path, seed: int = 0) -> None:
    """model.safetensors for the folder's config.json."""
    program = lower(read_model(folder).spec, NumberFormats("bf16", "bf16"))
    source = RandomWeights(program.params, seed)

    def pieces(info: TensorInfo) -> Iterator[Array]:
        for start in range(0, info.shape[0], BLOCK_ROWS):
            yield source.read(info.name, start, min(start + BLOCK_ROWS, info.shape[0]))

    write_safetensors(
        folder / "model.safetensors", [source.info(name) for name in sorted(source.names())], pieces
    )
