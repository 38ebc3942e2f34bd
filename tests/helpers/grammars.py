"""A vocabulary of a hundred tokens with merges, and grammars over it."""

from __future__ import annotations

import hashlib
import json
import time
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.structured.stepping import GrammarStepper
from quire.text.token_bytes import TokenBytes
from quire.text.tokenizer import Tokenizer
from quire.types import Grammar

VOCAB = 100
_CHARS = '{}[]":,.-+0123456789abcdefghijklmnopqrstuvwxyzN'
_MERGES = (
    '{ "', '" :', '" ,', '" }', ', "', 'n a', 'm e', 'na me', 'a g', 'ag e', 't r', 'u e', 'tr ue', 'o r', 'd e',
    'or de', 'orde r', 'n u', 'l l', 'nu ll', '1 2', '0 0', 'e r', 'i d', 'order id', '} ,', '": "', '] }', 'a l',
)  # fmt: skip


@cache
def tiny_tokenizer() -> Tokenizer:
    """Ids 0 to 4 are control tokens: the end-of-sequence ids of the requests that tests make."""
    control = [f"<{i}>" for i in range(5)]
    pieces = [*_CHARS, "\u0120", "\u010a"]  # space and line break
    pieces += [merge.replace(" ", "") for merge in _MERGES]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate([*control, *pieces])},
            merges=[tuple(merge.split()) for merge in _MERGES],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(control)
    return Tokenizer(backend)


@cache
def pieces() -> TokenBytes:
    return tiny_tokenizer().all_bytes(VOCAB)


def grammar(source: str) -> Grammar:
    return Grammar(source, hashlib.sha256(source.encode()).digest())


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    """Of a JSON schema, without white space."""
    compact = {**schema, "x-guidance": {"whitespace_flexible": False}}
    return grammar(json.dumps({"grammars": [{"json_schema": compact}]}))


def stepper(*grammars: Grammar, memory: int = 2**28, rows: int = 64, **options: Any) -> GrammarStepper:
    """One that has compiled these grammars."""
    made = GrammarStepper(tiny_tokenizer, memory, VOCAB, rows, **options)
    for one in grammars:
        while not made.prepare(one, pieces()):
            time.sleep(0.001)
    return made


def text_of(token_ids: list[int]) -> str:
    return b"".join(pieces()[token] for token in token_ids).decode()
