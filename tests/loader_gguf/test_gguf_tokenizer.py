"""Tokenizers from GGUF metadata: the ids and the text of the tokenizer that the metadata was made from."""

from __future__ import annotations

import functools
import io
import json
import unicodedata
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, trainers

from quire.text.gguf_tokenizer import gguf_outline, gguf_tokenizer
from quire.text.infill import fill_in_the_middle
from quire.text.pretokenizers import WORDS
from quire.text.tokenizer_files import check_regex
from quire.types import CheckpointError, RequestError, UnsupportedModelError

TEXTS = [
    "Hello, world! It's a test: 12345 + 67 = 12412.",
    "  two spaces, a\ttab\n\n\nand lines  \n",
    "def f(x):\n    return {'a': x[0], \"b\": [1.5e-3, 0xFF]}\n",
    "Grüße aus Köln; naïve café — “quotes” … ½ ﬁ",
    "日本語のテキストと中文，한국어도 Ελληνικά русский العربية हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 and a zero\u200bwidth, e\u0301 combining",
    "CamelCaseWords and SHOUTING, don't WE'LL they've",
    "", " ", "\n", "a",
]  # fmt: skip
CORPUS = [*TEXTS * 4, *["the quick brown fox jumps over the lazy dog and the cat sat on the mat"] * 8]


class Listed(list):
    """A metadata array as the parser gives it."""

    def strings(self) -> list[str]:
        return list(self)

    def numbers(self) -> np.ndarray:
        return np.array(list(self))


@functools.cache
def byte_level(name: str, words: Any) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A trained byte-level BPE tokenizer, and what a converter writes for it."""
    source = tokenizers.Tokenizer(models.BPE())
    source.pre_tokenizer = words.pre_tokenizer()
    if words.nfc:
        source.normalizer = normalizers.NFC()
    source.decoder = decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    source.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    source.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    source.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    vocab = source.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    pairs = [" ".join(pair) for pair in json.loads(source.to_str())["model"]["merges"]]
    types = [1] * (len(tokens) - 4) + [3, 3, 3, 4]
    return source, {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": Listed(tokens),
        "tokenizer.ggml.token_type": Listed(types), "tokenizer.ggml.merges": Listed(pairs),
        "tokenizer.ggml.bos_token_id": vocab["<s>"], "tokenizer.ggml.eos_token_id": vocab["</s>"],
        "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip


@functools.cache
def sentence_piece(**options: Any) -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    """A trained SentencePiece BPE with byte fallback, and what a converter writes for it."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, vocab_size=480, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.98, split_digits=True, minloglevel=2, **options,
    )  # fmt: skip
    source = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(source.vocab_size())
    types = [
        2 if source.is_unknown(i) else 3 if source.is_control(i) else 6 if source.is_byte(i) else 1
        for i in ids
    ]
    return source, {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": Listed(map(source.id_to_piece, ids)),
        "tokenizer.ggml.token_type": Listed(types), "tokenizer.ggml.scores": Listed(map(source.get_score, ids)),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "starcoder", "deepseek-v3"]
)
def test_byte_level_ids_and_text(name: str) -> None:
    source, metadata = byte_level(name, WORDS[name])
    found = gguf_tokenizer(metadata, "x.gguf")
    assert found is not None
    assert found.highest_id + 1 == source.get_vocab_size()
    outline = gguf_outline(metadata, "x.gguf")
    assert outline is not None
    assert (outline.size, outline.highest_id) == (found.vocab_size, found.highest_id)
    for text in [*TEXTS, "a<think>b</s>c <|im_end|>\n"]:
        expected = source.encode(text).ids
        assert found.encode(text, add_special_tokens=False) == expected
        assert found.decode(expected) == source.decode(expected)
        detokenizer = found.detokenizer()
        streamed = "".join(detokenizer.push([token]) for token in expected) + detokenizer.finish()
        assert streamed == source.decode(expected)
    begins = [metadata["tokenizer.ggml.bos_token_id"]] if WORDS[name].add_bos else []
    assert found.encode("a") == begins + source.encode("a").ids
    assert found.chat_templates == {"default": "{{ messages }}"}
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "names", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")], ids=lambda names: names[0]
)
def test_tokens_that_fill_in_the_middle_are_named_by_keys(names: tuple[str, ...]) -> None:
    source, metadata = byte_level("gpt-2", WORDS["gpt-2"])
    own = [source.token_to_id(token) for token in ("<s>", "<|im_end|>", "<think>")]
    keys = {f"tokenizer.ggml.{name}_token_id": number for name, number in zip(names, own, strict=True)}
    found = gguf_tokenizer({**metadata, **keys}, "x.gguf")
    assert found is not None
    texts = [source.encode(text).ids for text in ("the", "fox")]
    assert fill_in_the_middle(found, "the", "fox") == [own[0], *texts[0], own[1], *texts[1], own[2]]


LINE = "It's 12345 'The CamelCase x0000;\n\n  你好abc é!\n"
CUT = {
    "default": "It ' s _ 123 45 _ ' The _CamelCase _x 000 0 ; ||_ _你好abc _é ! |",
    "deepseek-llm": "It ' s _ 1 2 3 4 5 _' The _CamelCase _x 0 0 0 0 ; | | __ 你好 abc _é ! |",
    "falcon3": "It 's _ 123 45 _' The _CamelCase _x 000 0 ;|| _ _你好abc _é !|",
    "pixtral": "It 's _ 123 45 _' The _CamelCase _x 000 0 ;|| _ _你好abc _é !|",
    "kimi-k2": "It's _ 123 45 _' The _Camel Case _x 000 0 ;|| _ _ 你好 abc _é !|",
    "superbpe": "It's_ 12 345 _'The_CamelCase_x 0 000 ;||__你好abc_é!|",
    "qwen35": "It 's _ 1 2 3 4 5 _' The _CamelCase _x 0 0 0 0 ;|| _ _你好abc _é !|",
    "youtu": "It's _ 1 2 3 4 5 _' The _Camel Case _x 0 0 0 0 ;|| __ 你好 abc _é !|",
    "smollm": "It 's _ 1 2 3 4 5 _' The _CamelCase _x 0 0 0 0 ; ||_ _你好abc _é ! |",
}  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_words(name: str) -> None:
    """Words of a line: _ stands for a space, | for the end of a line."""
    found = WORDS[name].pre_tokenizer().pre_tokenize_str(LINE)
    words = [LINE[begin:end] for _, (begin, end) in found]
    assert " ".join(word.replace(" ", "_").replace("\n", "|") for word in words) == CUT[name]


@pytest.mark.parametrize("name", WORDS)
def test_every_way_keeps_the_text_and_cannot_backtrack_for_ever(name: str) -> None:
    for split in WORDS[name].splits:
        check_regex(split)
    source, metadata = byte_level("gpt-2", WORDS["gpt-2"])
    found = gguf_tokenizer({**metadata, "tokenizer.ggml.pre": name}, "x.gguf")
    assert found is not None
    for text in TEXTS:
        plain = unicodedata.normalize("NFC", text) if WORDS[name].nfc else text
        assert found.decode(found.encode(text, add_special_tokens=False)) == plain
    assert source.get_vocab_size() == found.vocab_size


@pytest.mark.parametrize("name", ["no-such", None])
def test_ids_need_no_way_to_cut_words(name: str | None) -> None:
    source, metadata = byte_level("llama-bpe", WORDS["llama-bpe"])
    changed = {**metadata, "tokenizer.ggml.pre": name}
    if name is None:
        del changed["tokenizer.ggml.pre"]
    found = gguf_tokenizer(changed, "x.gguf")
    assert found is not None
    ids = source.encode("Hello, world!").ids
    assert found.decode(ids) == "Hello, world!"
    assert b"".join(map(found.token_bytes, ids)) == b"Hello, world!"
    why = "'no-such' is unknown, so the model takes no text prompts" if name else "is missing"
    for encode in (found.encode, lambda text: found.encode_guarded(text, [])):
        with pytest.raises(
            RequestError, match=rf"text: x.gguf: tokenizer.ggml.pre.*{why}.*; send token ids instead"
        ):
            encode("Hello")
    outline = gguf_outline(changed, "x.gguf")
    assert outline is not None
    assert "is unknown: token ids only" in outline.kind


def test_spelled_control_tokens_are_plain_text_when_asked() -> None:
    source, metadata = byte_level("llama-bpe", WORDS["llama-bpe"])
    found = gguf_tokenizer(metadata, "x.gguf")
    assert found is not None
    ids = found.encode("x</s>y", add_special_tokens=False, parse_special=False)
    assert source.token_to_id("</s>") not in ids
    assert found.decode(ids) == "x</s>y"


def test_words_matter() -> None:
    """Negative control: the same vocabulary cut into words in another way gives other ids."""
    source, metadata = byte_level("llama-bpe", WORDS["llama-bpe"])
    other = gguf_tokenizer({**metadata, "tokenizer.ggml.pre": "starcoder"}, "x.gguf")
    assert other is not None
    assert any(other.encode(text, add_special_tokens=False) != source.encode(text).ids for text in TEXTS)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_ids_and_text(prefix: bool) -> None:
    source, metadata = sentence_piece(add_dummy_prefix=prefix)
    found = gguf_tokenizer(metadata | {"tokenizer.ggml.add_space_prefix": prefix}, "x.gguf")
    assert found is not None
    for text in TEXTS:
        expected = source.encode(text)
        assert found.encode(text, add_special_tokens=False) == expected
        assert found.encode(text) == [1, *expected]
        assert found.decode(expected) == text
        detokenizer = found.detokenizer()
        assert "".join(detokenizer.push([t]) for t in expected) + detokenizer.finish() == text


def test_scores_matter() -> None:
    """Negative control: merges follow the scores, not the order of the vocabulary."""
    source, metadata = sentence_piece()
    scores = metadata["tokenizer.ggml.scores"]
    found = gguf_tokenizer({**metadata, "tokenizer.ggml.scores": Listed(-s for s in scores)}, "x.gguf")
    assert found is not None
    assert any(found.encode(text, add_special_tokens=False) != source.encode(text) for text in TEXTS)


def test_tokens_added_around_a_text_follow_the_keys() -> None:
    _, metadata = sentence_piece()
    flags = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    found = gguf_tokenizer(metadata | flags, "x.gguf")
    assert found is not None
    assert found.encode("a")[-1] == 2
    assert found.encode("a")[0] != 1


def test_no_tokenizer() -> None:
    assert gguf_tokenizer({}, "x.gguf") is None
    assert gguf_tokenizer({"tokenizer.ggml.model": "none"}, "x.gguf") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "model = 'bert' is not supported: implemented are gpt2, llama"),
        ({"tokenizer.ggml.tokens": None}, "tokens: is missing"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokens: is not an array"),
        ({"tokenizer.ggml.tokens": Listed(["a", "a"])}, "tokens: contains a token twice"),
        ({"tokenizer.ggml.tokens": Listed(["a" * 20_000])}, "tokens: contains a token of more than"),
        ({"tokenizer.ggml.token_type": Listed([1])}, "token_type: 1 types for"),
        ({"tokenizer.ggml.merges": Listed(["a"])}, "merges: entry 0, 'a', does not join"),
        ({"tokenizer.ggml.merges": Listed(["a b c"])}, "merges: entry 0, 'a b c', does not join"),
        ({"tokenizer.ggml.bos_token_id": "1"}, "bos_token_id: '1' is not the id of a token"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token: is not a boolean"),
        ({"tokenizer.chat_template": 3}, "chat_template: is not a string"),
    ],
)
def test_malformed_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    _, metadata = byte_level("llama-bpe", WORDS["llama-bpe"])
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        gguf_tokenizer({**metadata, **changes}, "x.gguf")


class Long:
    """An array that claims to be longer than the limit; reading its elements fails the test."""

    def __len__(self) -> int:
        return 2**31

    def strings(self) -> list[str]:
        raise AssertionError("made before its length was looked at")

    numbers = strings


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type"])
def test_arrays_over_the_limit_are_not_made(key: str) -> None:
    _, metadata = byte_level("llama-bpe", WORDS["llama-bpe"])
    with pytest.raises(CheckpointError, match=f"{key}: 2147483648 entries exceed the limit"):
        gguf_tokenizer({**metadata, f"tokenizer.ggml.{key}": Long()}, "x.gguf")


def test_long_pieces_are_refused_before_they_are_cut() -> None:
    _, metadata = sentence_piece()
    tokens = [*metadata["tokenizer.ggml.tokens"].strings(), *("ab" * 4000 + str(n) for n in range(8))]
    changes = {
        "tokenizer.ggml.tokens": Listed(tokens), "tokenizer.ggml.scores": Listed([0.0] * len(tokens)),
        "tokenizer.ggml.token_type": Listed([1] * len(tokens)),
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="tokens: its pieces are too long"):
        gguf_tokenizer({**metadata, **changes}, "x.gguf")


def test_malformed_scores_are_named() -> None:
    _, metadata = sentence_piece()
    for scores, message in (([1.0], "1 scores for"), ([float("nan")] * 480, "NaN")):
        with pytest.raises(CheckpointError, match=message):
            gguf_tokenizer({**metadata, "tokenizer.ggml.scores": Listed(scores)}, "x.gguf")
