"""A tokenizer without merges, for models that are tiny or never run."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

CONTROL = ("<pad>", "<s>", "</s>")
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_tokenizer(
    *markers: str, control: tuple[str, ...] = CONTROL, most: int | None = None
) -> tokenizers.Tokenizer:
    """Control tokens, bytes and markers. Of the bytes `most` may be there: space, line break, then printable ASCII."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if most is not None:
        alphabet.sort(key=lambda char: "\u010a\u0120".find(char), reverse=True)
    vocab = {token: i for i, token in enumerate([*control, *alphabet[:most]])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*control, *markers])
    return made


def write_tokenizer(folder: Path, made: tokenizers.Tokenizer, chat_template: str = CHAT_TEMPLATE) -> None:
    """The files of a tokenizer with the control tokens above."""
    made.save(str(folder / "tokenizer.json"))
    pad, start, end = CONTROL
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": start, "eos_token": end, "pad_token": pad,
        "chat_template": chat_template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
