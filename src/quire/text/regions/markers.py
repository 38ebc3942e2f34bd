"""Markers: the parts of a region's openers and closers that are one token of the vocabulary.

A marker is recognised by its id alone, so text that spells one is text. Inside the reader a marker is one lone
surrogate, a character that no decoded text contains: formats are then matched in a string, whatever is a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from quire.text.regions.spec import HeadedCall, RegionSpec
from quire.text.tokenizer import Tokenizer

_SHAPE = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")  # how tokens for markers look in every family
_FIRST = 0xD800
_MARKER = re.compile(r"[\ud800-\udfff]")
# Of harmony: what stands between the messages of one turn.
CHANNEL_MARKERS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)


class Markers:
    """The markers of a spec in a vocabulary. Immutable; made once for a model. `ids` has the id of each text.

    `opens_thinking` and `closes_thinking` are the tokens that open and close the thinking region.
    """

    __slots__ = ("_chars", "_spelled", "_texts", "by_id", "closes_thinking", "ids", "opens_thinking")

    def __init__(
        self,
        ids: Mapping[str, int] | None = None,
        opens_thinking: tuple[int, ...] = (),
        closes_thinking: tuple[int, ...] = (),
    ) -> None:
        self.opens_thinking, self.closes_thinking = opens_thinking, closes_thinking
        self.ids = dict(sorted((ids or {}).items()))
        self._chars = {text: chr(_FIRST + place) for place, text in enumerate(self.ids)}
        self._spelled = {char: text for text, char in self._chars.items()}
        # id -> its character, and how it is spelled
        self.by_id = {number: (self._chars[text], text) for text, number in self.ids.items()}
        longest = sorted(self.ids, key=len, reverse=True)
        self._texts = re.compile("|".join(map(re.escape, longest)) or "(?!)")

    @classmethod
    def of(cls, spec: RegionSpec, tokenizer: Tokenizer) -> Markers:
        """The texts of `spec` that are one token of a tokenizer."""
        found = {}
        for text in sorted({text for written in _texts(spec) for text in _SHAPE.findall(written)}):
            number = tokenizer.token_to_id(text)
            if number is not None and tokenizer.token_bytes(number) == text.encode():
                found[text] = number
        reasoning = spec.reasoning
        spelled = () if reasoning is None else (reasoning.opener.strip(), reasoning.closer.rstrip())
        return cls(found, *(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spelled))

    def encode(self, text: str) -> str:
        """A text of the spec as the reader sees it: markers are characters."""
        return self._texts.sub(lambda match: self._chars[match.group()], text)

    def spell(self, text: str, *, hide: bool = False) -> str:
        """The inverse: markers are spelled, or left out."""
        if text.isascii():
            return text
        return _MARKER.sub(lambda match: "" if hide else self._spelled[match.group()], text)

    def split(self, text: str) -> list[str | int]:
        """A text of the spec as text and ids of tokens, in order."""
        pieces: list[str | int] = []
        at = 0
        for match in self._texts.finditer(text):
            pieces += [text[at : match.start()], self.ids[match.group()]]
            at = match.end()
        return [piece for piece in [*pieces, text[at:]] if piece != ""]


def _texts(spec: RegionSpec) -> Iterator[str]:
    """Every text of a spec that may hold markers."""
    yield from spec.answer
    if spec.reasoning is not None:
        yield from (spec.reasoning.opener, spec.reasoning.closer)
        if spec.reasoning.channel:
            yield from CHANNEL_MARKERS
    if spec.calls is not None:
        calls = spec.calls
        yield from (calls.opener, calls.closer, *calls.others, calls.between or "")
        if isinstance(calls.call, HeadedCall):
            for part in calls.call.head:
                yield from (
                    piece
                    for piece in (part if isinstance(part, tuple) else (part,))
                    if isinstance(piece, str)
                )
            yield calls.call.tail
            if (tags := calls.call.tags) is not None:
                yield from (tags.open, tags.middle, tags.close)
