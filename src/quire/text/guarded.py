"""Encode a rendered chat so that only the template's own text produces control tokens."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import compress, count, pairwise
from typing import NamedTuple

import tokenizers

from quire.text.sparse import Ids, SparseTokenizer

Spans = Sequence[tuple[int, int]]
_Spelled = tuple[int, int, int]  # the id of a token, and the range of its characters
Backend = tokenizers.Tokenizer | SparseTokenizer
Encoding = tokenizers.Encoding | Ids
Encode = Callable[[Backend, str, int | None], Encoding]

# Checkpoints declare some control tokens as ordinary added ones; llama.cpp also uses this pattern.
_CONTROL_SHAPE = re.compile(r"<\|.+\|>|<\uff5c.+\uff5c>", re.DOTALL)
_CACHED_RUNS = 256
_LONGEST_CACHED = 1 << 14  # characters
_WORD, _SIGN = re.compile(r"\w"), re.compile(r"[^\w\s]")
_WORDS, _SIGNS = range(0xA000, 0xA48D), range(0xFDD0, 0xFDF0)  # Yi syllables; noncharacters


class _Token(NamedTuple):
    """A token in a text: its id, its own characters, and all that it consumes (with adjacent white space)."""

    number: int
    low: int
    high: int
    start: int
    end: int


class GuardedEncoder:
    """Encodes a text in which a chat template wrote some spans.

    `plain` and `plain_inner` are `backend` without added tokens, for the start of a text and for text after a token;
    `encode` calls the library. A control token is one that is special in `backend`, or that looks like one.
    """

    def __init__(
        self,
        backend: Backend,
        plain: Backend,
        plain_inner: Backend,
        encode: Encode,
    ) -> None:
        self._backend, self._plain, self._plain_inner, self._encode = backend, plain, plain_inner, encode
        added = backend.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self.control_ids = frozenset(
            number
            for number, token in added.items()
            if token.special or _CONTROL_SHAPE.fullmatch(token.content)
        )
        # Of the added tokens that are no control tokens. One that is matched in normalized text may be anywhere: "".
        self._spellings = [
            "" if token.normalized else token.content
            for number, token in added.items()
            if number not in self.control_ids
        ]
        self._control_of_run = lru_cache(_CACHED_RUNS)(self._scan_run)

    @cached_property
    def _unknown(self) -> Collection[int]:
        """Ids of the model for unknown characters, which are not added tokens there."""
        return self._added.keys() & self._encode(self._plain, chr(_SIGNS[0]), None).ids

    def encode(self, text: str, own: Spans, max_tokens: int | None = None) -> list[int]:
        """The ids of the library, if its control tokens are those of the own spans; else those control tokens, and
        everything between them as text.
        """
        encoding = self._encode(self._backend, text, max_tokens)
        ids: list[int] = encoding.ids
        if self._found(text, encoding, ids) == self._expected(text, own):
            return ids
        return self._encode_apart(text, own, encoding)

    def encode_inside(self, text: str) -> list[int]:
        """The ids of a text behind other text, without control tokens."""
        if not any(spelling in text for spelling in self._spellings):
            return self._plain_ids(text, inner=True)
        others = self._tokens(
            text, self._encode(self._backend, text, None), self._added.keys() - self.control_ids
        )
        return self._joined(text, others, inner=True)

    def _found(self, text: str, encoding: Encoding, ids: list[int]) -> list[_Spelled]:
        """The control tokens in an encoding of `text`."""
        found: list[_Spelled] = []
        for index in compress(count(), map(self.control_ids.__contains__, ids)):
            number = ids[index]
            start, end = encoding.token_to_chars(index) or (0, 0)
            if text[start:end] != self._added[number]:
                start, end = _without_space(text, start, end)
                if number in self._unknown and text[start:end] != self._added[number]:
                    continue
            found.append((number, start, end))
        return found

    def _expected(self, text: str, own: Spans) -> list[_Spelled]:
        """The control tokens of the own spans, with each span encoded separately."""
        expected: list[_Spelled] = []
        for start, end in own:
            run = text[start:end]
            found = self._control_of_run(run) if end - start <= _LONGEST_CACHED else self._scan_run(run)
            expected += [(number, start + low, start + high) for number, low, high in found]
        return expected

    def _scan_run(self, run: str) -> list[_Spelled]:
        if isinstance(self._backend, SparseTokenizer):
            encoding: Encoding = self._backend.added_in(run)
        else:
            encoding = self._encode(self._backend, run, None)
        return self._found(run, encoding, encoding.ids)

    def _tokens(self, text: str, encoding: Encoding, wanted: Collection[int]) -> Iterator[_Token]:
        """The added tokens of `wanted` in an encoding of `text`."""
        for index, number in enumerate(encoding.ids):
            if number in wanted:
                start, end = encoding.token_to_chars(index) or (0, 0)
                low, high = _without_space(text, start, end)
                if number not in self._unknown or text[low:high] == self._added[number]:
                    yield _Token(number, low, high, start, end)

    def _encode_apart(self, text: str, own: Spans, encoding: Encoding) -> list[int]:
        """The added tokens of the own spans, other added tokens except control tokens, and the text between them."""
        masked = self._masked(text, own)
        starts = [start for start, _ in own]
        real = [
            token
            for token in self._tokens(masked, self._encode(self._backend, masked, None), self._added)
            if (index := bisect_right(starts, token.low)) and token.high <= own[index - 1][1]
        ]
        others = self._tokens(text, encoding, self._added.keys() - self.control_ids)
        return self._joined(text, _merged(real, others))

    def _joined(self, text: str, tokens: Iterable[_Token], *, inner: bool = False) -> list[int]:
        """These tokens, and the text between them; `inner`: there is other text before."""
        ids: list[int] = []
        position = 0
        for token in tokens:
            ids += self._plain_ids(text[position : token.start], inner=inner or position > 0)
            ids.append(token.number)
            position = max(position, token.end)
        return ids + self._plain_ids(text[position:], inner=inner or position > 0)

    def _masked(self, text: str, own: Spans) -> str:
        """`text` with all but its own characters replaced by some outside all added tokens, letters by a letter."""
        taken = set().union(*self._added.values())
        word = next((char for char in map(chr, _WORDS) if char not in taken), " ")
        sign = next((char for char in map(chr, _SIGNS) if char not in taken), " ")
        parts: list[str] = []
        position = 0
        for start, end in [*own, (len(text), len(text))]:
            parts += [_SIGN.sub(sign, _WORD.sub(word, text[position:start])), text[start:end]]
            position = end
        return "".join(parts)

    def _plain_ids(self, text: str, *, inner: bool) -> list[int]:
        """`text` without added tokens. If the model itself has a token with a control token's spelling, split it."""
        if not text:
            return []
        encoding = self._encode(self._plain_inner if inner else self._plain, text, None)
        ids: list[int] = encoding.ids
        forged = self._found(text, encoding, ids)
        if not forged:
            return ids
        cuts = {0, len(text)}
        for _, low, high in forged:
            cuts |= {(low + high) // 2} if high - low > 1 else {low, high}
        at = sorted(cuts)
        if len(at) == 2:  # one character, which cannot be split
            return [number for number in ids if number not in self.control_ids] or [*self._unknown]
        return [n for a, b in pairwise(at) for n in self._plain_ids(text[a:b], inner=inner or a > 0)]


def _without_space(text: str, start: int, end: int) -> tuple[int, int]:
    """The range without the white space that some tokens consume; unchanged if there is nothing else."""
    spelled = text[start:end]
    low = start + len(spelled) - len(spelled.lstrip())
    high = start + len(spelled.rstrip())
    return (low, high) if low < high else (start, end)


def _merged(real: list[_Token], others: Iterator[_Token]) -> list[_Token]:
    """All in order, without `others` that overlap a real one."""
    lows = [token.low for token in real]
    kept: list[_Token] = []
    for token in others:
        after = bisect_right(lows, token.low)
        if (not after or real[after - 1].high <= token.low) and (
            after == len(real) or token.high <= real[after].low
        ):
            kept.append(token)
    return sorted(real + kept, key=lambda token: token.low)
