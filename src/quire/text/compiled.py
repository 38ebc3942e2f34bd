"""A compiled tokenizer, a file that loads at once: vocabulary and merges as tables, the rest as JSON.

    32 bytes  SHA-256 of everything that follows
    32 bytes  key, which identifies the source
    8 bytes   length of the JSON, which follows: tokenizer.json without vocabulary and merges, and facts
    tables    of 32-bit numbers, then the UTF-8 bytes of tokens; their lengths are in the JSON

It is made from a tokenizer that the library has built, so the library has checked its content.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from zlib import crc32

import tokenizers

FORMAT = 1
MAX_BYTES = 2**28
# Options of a model with which the tokens of a word depend on more than the tokens inside it.
_OTHER = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_MAX_STEPS = 256  # probes from a token's hash to its place in the table
_TABLES = ("starts", "slots", "firsts", "ranks", "lefts", "rights")


def compile_tokenizer(backend: tokenizers.Tokenizer, key: bytes) -> bytes | None:
    """Compile a tokenizer; None if it is not BPE, or the tables cannot express it."""
    state = json.loads(backend.to_str())
    model = state["model"]
    around = _around(backend)
    if model.get("type") != "BPE" or any(model.get(key) for key in _OTHER) or around is None:
        return None
    vocab: dict[str, int] = model.pop("vocab")
    merges: list[Sequence[str]] = [
        merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.pop("merges")
    ]
    added = {token["id"]: token["content"] for token in state["added_tokens"]}
    texts = {number: token for token, number in vocab.items()}
    if any(texts.get(number, content) != content for number, content in added.items()):
        return None
    tokens = [texts.get(number, "").encode() for number in range(max([*texts, *added], default=-1) + 1)]
    if len(tokens) > 4 * (len(texts) + len(added)):
        return None  # ids with large gaps
    slots = _slots(vocab, tokens)
    if slots is None:
        return None
    tables = {"starts": array("I", [0, *accumulate(map(len, tokens))]), "slots": slots}
    tables |= _merge_tables(merges, vocab, len(tokens))
    facts = {
        "state": state, "around": around, "size": backend.get_vocab_size(with_added_tokens=True),
        "longest": max(map(len, vocab), default=0), "tables": [len(tables[name]) for name in _TABLES],
    }  # fmt: skip
    head = json.dumps(facts).encode()
    head += b" " * (-len(head) % 4)
    parts = [
        key,
        len(head).to_bytes(8, "little"),
        head,
        *(tables[name].tobytes() for name in _TABLES),
        *tokens,
    ]
    body = b"".join(parts)
    return hashlib.sha256(body).digest() + body if len(body) < MAX_BYTES - 32 else None


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids added before and after a text; None if they differ between two texts."""
    found = []
    for text in ("a", "b c"):
        bare = backend.encode(text, add_special_tokens=False).ids
        whole = backend.encode(text).ids
        places = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
        if not bare or len(places) != 1:
            return None
        found.append((whole[: places[0]], whole[places[0] + len(bare) :]))
    return found[0] if found[0] == found[1] else None


def _slots(vocab: dict[str, int], tokens: list[bytes]) -> array[int] | None:
    """A hash table of the model's tokens: id + 1, or 0 for a free place; at most half full.

    None if too many tokens collide, which may be an attack.
    """
    size = 1 << max(4, (2 * len(vocab)).bit_length())
    slots = array("I", bytes(4 * size))
    for number in vocab.values():
        first = crc32(tokens[number])
        place = next(
            (at & (size - 1) for at in range(first, first + _MAX_STEPS) if not slots[at & (size - 1)]), None
        )
        if place is None:
            return None
        slots[place] = number + 1
    return slots


def _merge_tables(merges: list[Sequence[str]], vocab: dict[str, int], count: int) -> dict[str, array[int]]:
    """Merges by resulting token: those of token `t` are firsts[t] to firsts[t + 1], each a rank and two ids."""
    made: list[list[int]] = [[] for _ in range(count)]
    for rank, (left, right) in enumerate(merges):
        made[vocab[left + right]].append(rank)
    ranks = array("I", [rank for each in made for rank in each])
    return {
        "firsts": array("I", [0, *accumulate(map(len, made))]),
        "ranks": ranks,
        "lefts": array("I", [vocab[merges[rank][0]] for rank in ranks]),
        "rights": array("I", [vocab[merges[rank][1]] for rank in ranks]),
    }


class CompiledTokenizer:
    """A compiled file with lookups in its tables. ValueError if it was changed or has another key."""

    def __init__(self, data: bytes, key: bytes) -> None:
        if hashlib.sha256(memoryview(data)[32:]).digest() != data[:32] or data[32:64] != key:
            raise ValueError("it is truncated or changed, or belongs to another tokenizer")
        at = 72 + int.from_bytes(data[64:72], "little")
        facts: dict[str, Any] = json.loads(data[72:at])
        tables = []
        for length in facts["tables"]:
            tables.append(memoryview(data)[at : at + 4 * length].cast("I"))
            at += 4 * length
        self._starts, self._slots, self._firsts, self._ranks, self._lefts, self._rights = tables
        self._data, self._base = data, at
        self.state: dict[str, Any] = facts["state"]
        self.around: tuple[list[int], list[int]] = (facts["around"][0], facts["around"][1])
        self.size: int = facts["size"]
        self.highest_id = len(self._starts) - 2
        self.longest: int = facts["longest"]

    def bytes_of(self, number: int) -> bytes:
        """The UTF-8 of a model token; b"" for an unknown id."""
        if not 0 <= number < len(self._starts) - 1:
            return b""
        return self._data[self._base + self._starts[number] : self._base + self._starts[number + 1]]

    def find(self, token: bytes) -> int | None:
        """The id of a model token."""
        slots, mask = self._slots, len(self._slots) - 1
        first = crc32(token)
        for at in range(first, first + _MAX_STEPS):
            number = slots[at & mask]
            if not number:
                return None
            if self.bytes_of(number - 1) == token:
                return number - 1
        return None

    def merges_into(self, number: int) -> list[tuple[int, int, int]]:
        """Rank and two ids of each merge that makes a token."""
        first, last = self._firsts[number], self._firsts[number + 1]
        return [(self._ranks[at], self._lefts[at], self._rights[at]) for at in range(first, last)]
