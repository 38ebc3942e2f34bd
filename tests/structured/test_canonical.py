"""The canonical tokens of a text inside an output, for every kind of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import tokenizers
from llguidance import LLMatcher
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from quire.config.shipped import DEFAULT_MODEL, shipped_models
from quire.structured.grammar_limits import parser_limits
from quire.structured.grammar_tokens import GrammarTokens
from quire.structured.matcher import GrammarState
from quire.text.tokenizer import Tokenizer

TEXTS = [
    '{"name": "orderId", "age": 12345, "tags": ["a b", " c"], "é": "naïve 漢字"}',
    "true", "  two spaces", "it's\n\n  1,234.56 (x)", "<s>[INST]</s> <|im_end|>", '","name":"', " x",
]  # fmt: skip
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=CONTROL, initial_alphabet=alphabet)
    )
    return made


def pieces_bpe() -> tokenizers.Tokenizer:
    """As SentencePiece's BPE with byte fallback, a space before the first piece."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.train_from_iterator(
        TEXTS[:3] * 3, trainers.BpeTrainer(vocab_size=500, special_tokens=[*CONTROL, *BYTES])
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )  # fmt: skip
    state = json.loads(made.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in BYTES]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def old_pieces_bpe() -> tokenizers.Tokenizer:
    """The same with a normalizer that puts a space before every text."""
    made = pieces_bpe()
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def unigram() -> tokenizers.Tokenizer:
    base = json.loads(pieces_bpe().to_str())
    vocab = [
        [piece, -(float(i + 1) ** 0.5)]
        for piece, i in sorted(base["model"]["vocab"].items(), key=lambda p: p[1])
    ]
    base["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": True}
    return tokenizers.Tokenizer.from_str(json.dumps(base))


def shipped() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(shipped_models()[DEFAULT_MODEL] / "tokenizer.json"))


KINDS = [byte_level, pieces_bpe, old_pieces_bpe, unigram, shipped]


def behind_a_line(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """The library's ids of a text behind a line break and without control tokens."""
    plain = tokenizers.Tokenizer(backend.model)
    plain.normalizer, plain.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    lead = plain.encode("\n", add_special_tokens=False).ids
    ids = plain.encode("\n" + text, add_special_tokens=False).ids
    return ids[len(lead) :] if ids[: len(lead)] == lead else plain.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_forced_text_has_the_tokens_of_the_tokenizer(kind: Callable[[], tokenizers.Tokenizer]) -> None:
    backend = kind()
    tokenizer = Tokenizer(backend)
    pieces = tokenizer.all_bytes(backend.get_vocab_size())
    tokens = GrammarTokens(pieces, tokenizer)
    for text in TEXTS:
        source = json.dumps({"grammars": [{"lark_grammar": f"start: {json.dumps(text)}"}]})
        matcher = LLMatcher(tokens.trie, source, log_level=0, limits=parser_limits())
        assert not matcher.is_error(), matcher.get_error()
        state, made = GrammarState(matcher), list[int]()
        while state.forced:
            made += state.forced
            state.step(state.forced)
        assert state.failure is None
        assert state.complete
        assert b"".join(pieces[token] for token in made).decode() == text
        expected = behind_a_line(backend, text)
        if not {*expected} & tokenizer.control_ids:  # as a piece of Unigram may be
            assert made == expected
        assert not {*made} & tokenizer.control_ids


def test_one_token_stands_for_a_byte_that_has_two() -> None:
    """Of a byte token and a piece with the same byte, masks allow the piece."""
    backend = pieces_bpe()
    tokenizer = Tokenizer(backend)
    tokens = GrammarTokens(tokenizer.all_bytes(backend.get_vocab_size()), tokenizer)
    assert tokens.trie.decode_bytes([backend.token_to_id("a")]) == b"a"
    assert tokens.trie.decode_bytes([backend.token_to_id("<0x61>")]) != b"a"
    assert tokens.trie.decode_bytes([backend.token_to_id("<0x07>")]) == b"\x07"  # it has no piece


def test_texts_that_come_again_are_tokenized_once() -> None:
    tokenizer = Tokenizer(byte_level())
    asked: list[str] = []

    class Counting(Tokenizer):
        def encode_inside(self, text: str) -> list[int]:
            asked.append(text)
            return tokenizer.encode_inside(text)

    pieces = tokenizer.all_bytes(tokenizer.vocab_size)
    tokens = GrammarTokens(pieces, Counting(byte_level()))
    texts = ['","name":"', '{"name":"', '","name":"', "long " * 40, "long " * 40]
    asked.clear()
    assert [tokens.trie.tokenize_str(text) for text in texts] == list(map(tokenizer.encode_inside, texts))
    assert asked == ['","name":"', '{"name":"', "long " * 40, "long " * 40]
