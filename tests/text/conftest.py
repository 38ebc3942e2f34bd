"""One folder for each kind of tokenizer, trained once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from .builders import QWEN_SPLIT, byte_level, sentencepiece_bpe, suffix_bpe, unigram, word_piece, write_folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> folder, one for each kind of tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    chat = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    llama = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    old = {**llama, "tokenizer_class": "LlamaTokenizer"}
    return {
        "gpt2": write_folder(root / "gpt2", byte_level(), **chat),
        "qwen": write_folder(root / "qwen", byte_level(QWEN_SPLIT, nfc=True), **chat),
        "llama-new": write_folder(root / "llama-new", sentencepiece_bpe("normalizer"), legacy=False, **old),
        "llama-old": write_folder(root / "llama-old", sentencepiece_bpe("normalizer"), legacy=True, **old),
        "mistral": write_folder(
            root / "mistral", sentencepiece_bpe("first"), **llama, tokenizer_class="PreTrainedTokenizerFast"
        ),
        "gemma": write_folder(
            root / "gemma", sentencepiece_bpe("never"), **llama, tokenizer_class="PreTrainedTokenizerFast"
        ),
        "plain-file": write_folder(
            root / "plain-file",
            sentencepiece_bpe("normalizer"),
            **llama,
            tokenizer_class="PreTrainedTokenizerFast",
        ),
        "unigram": write_folder(
            root / "unigram", unigram(), **llama, tokenizer_class="PreTrainedTokenizerFast"
        ),
        "word-piece": write_folder(
            root / "word-piece", word_piece(), tokenizer_class="PreTrainedTokenizerFast"
        ),
        "suffix": write_folder(root / "suffix", suffix_bpe(), tokenizer_class="PreTrainedTokenizerFast"),
    }
