"""Tokenizers trained on the spot: byte level (GPT-2, Qwen style) and SentencePiece style (Llama, Mistral,
Gemma).
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = (
    "the quick brown fox jumps over a lazy dog while seventy two kings bring wax and zinc to quiet judges",
    "def main(args): return {key: value for key, value in args.items() if value != 0}  # done\n\n\tx += 1",
    "Größe, façade, naïve, œuvre, Łódź; привет мир, как дела? 你好,世界。今日は。 한국어 텍스트 😀 👍🏽 é ñ",
    "It's 2024-05-17 and 3.14159 isn't 22/7; we'll see 1000000 things they've never seen — “quoted” …",
)
CORPUS = [f"{line} {index}" for index in range(40) for line in WORDS]

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(split: str | None = None, *, nfc: bool = False) -> tokenizers.Tokenizer:
    """A byte-level BPE; with `split` the way Llama-3 and Qwen split words, without it GPT-2's way."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(CHAT_SPECIAL)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def sentencepiece_bpe(scheme: str) -> tokenizers.Tokenizer:
    """A BPE with byte fallback. `scheme`: "normalizer" (old Llama files), "first" (Mistral), "never"
    (Gemma).
    """
    trained = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # The byte tokens must be in the vocabulary without being added tokens, so only the vocabulary is kept.
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=tokens, limit_alphabet=90, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [
        tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]
    ]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif scheme == "never":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if scheme != "never":
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    for token in ("<unk>", "<s>", "</s>"):
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
    tokenizer.add_special_tokens(
        [AddedToken("[INST]", normalized=False), AddedToken("[/INST]", normalized=False)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """A Unigram with Metaspace on both sides (T5, ALBERT style): a decoder that only the window handles."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def suffix_bpe() -> tokenizers.Tokenizer:
    """A BPE that marks the ends of words (the first GPT, CLIP)."""
    tokenizer = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_folder(path: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    """A tokenizer folder as a checkpoint has it."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
