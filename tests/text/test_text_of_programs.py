"""The plain text of a generation program is tokenized as the same text in one prompt, whatever the tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.lang.transcript import PromptWriter, Transcript
from quire.text.tokenizer import Tokenizer

KINDS = ["gpt2", "qwen", "llama-new", "llama-old", "mistral", "gemma", "unigram", "word-piece", "suffix"]


@pytest.mark.parametrize("kind", KINDS)
def test_text_in_parts_is_tokenized_as_a_whole(folders: dict[str, Path], kind: str) -> None:
    tokenizer = Tokenizer.from_dir(folders[kind])
    writer = PromptWriter(tokenizer)
    for text in ("the quick brown fox", " a", "1 jumps </s> over", "<|im_start|>user\nquiet"):
        parts = Transcript()
        for part in (text[:2], text[2:5]):
            parts.add(part, own=True)
        assert writer.encode(writer.render(parts), text[5:]) == tokenizer.encode(text)
        parts.add(text[5:], own=True)
        assert writer.encode(writer.render(parts)) == tokenizer.encode(text)
