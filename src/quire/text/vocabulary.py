"""The contribution of each token to the text, for decoders that concatenate.

The library decodes a list of tokens at once. Two decoders, which cover nearly every language model, can be split
exactly into one contribution per token:

- byte level (GPT-2, Radford et al. 2019): a token is a byte string, the text is the bytes read as UTF-8
  where each maximal invalid part becomes one U+FFFD (Unicode 15, section 3.9, "substitution of maximal
  subparts");
- SentencePiece style (Kudo & Richardson 2018) with byte fallback: a token is text or one byte; a maximal
  run of byte tokens is text if the whole run is valid UTF-8, else one U+FFFD *per byte*; a fixed number of
  leading characters (the dummy space) is stripped from the start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Generic, TypeVar

from quire.records import dataclass

T = TypeVar("T")

_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2}|\+[0-9a-fA-F])>")


def _byte_level_alphabet() -> dict[int, int]:
    """Code point -> byte of GPT-2's alphabet; other characters map to U+FFFF, which Latin-1 refuses."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = dict.fromkeys(others, 0xFFFF)
    alphabet.update({256 + index: byte for index, byte in enumerate(others)})
    alphabet.update({byte: byte for byte in printable})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with a character outside the alphabet means its own UTF-8."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ByteLevelDecoder:
    """Concatenate bytes, then read them as UTF-8."""


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """Concatenate pieces: replacements within a token, byte tokens with `byte_fallback`, a strip at the start."""

    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    strip_count: int = 0

    def piece(self, token: str) -> str | int:
        """The text of a token, or the byte of a byte token."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return int(match.group(1), 16)
        return token


def recognise_decoder(state: bytes | None) -> ByteLevelDecoder | PieceDecoder | None:
    """The decoder that equals a serialized library decoder, None if it is not one of the two exact kinds."""
    if state is None:
        return None
    steps = _steps(json.loads(state))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelDecoder()
    replaces = next((index for index, kind in enumerate(kinds) if kind != "Replace"), len(kinds))
    replacements = _replacements(steps[:replaces])
    byte_fallback = kinds[replaces : replaces + 1] == ["ByteFallback"]
    rest = steps[replaces + byte_fallback :]
    if replacements is None or not (replacements or byte_fallback):
        return None
    return _with_strip(PieceDecoder(replacements, byte_fallback), rest)


def _replacements(steps: list[dict[str, object]]) -> tuple[tuple[str, str], ...] | None:
    """The plain-text replacements of Replace steps; None if one has a regular expression."""
    found: list[tuple[str, str]] = []
    for step in steps:
        pattern, new = step.get("pattern"), step.get("content")
        old = pattern.get("String") if isinstance(pattern, dict) else None
        if not isinstance(old, str) or not old or not isinstance(new, str):
            return None
        found.append((old, new))
    return tuple(found)


def _with_strip(decoder: PieceDecoder, rest: list[dict[str, object]]) -> PieceDecoder | None:
    """`decoder` followed by nothing, by Fuse, or by Fuse and a Strip of the start; None for anything else."""
    kinds = [step.get("type") for step in rest]
    if kinds in ([], ["Fuse"]):
        return decoder
    if kinds == ["Fuse", "Strip"]:
        content, start = rest[1].get("content"), rest[1].get("start")
        if isinstance(content, str) and isinstance(start, int) and rest[1].get("stop") == 0:
            return replace(decoder, strip=content, strip_count=start)
    return None


def _steps(decoder: dict[str, object]) -> list[dict[str, object]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    nested = decoder.get("decoders")
    assert isinstance(nested, list)
    return [step for child in nested for step in _steps(child)]


class TokenTable(dict[int, T], Generic[T]):
    """Token id -> contribution, filled as ids occur, so that a large vocabulary costs nothing at start.

    Unknown ids contribute `nothing` (the library skips them) and are not stored.
    """

    def __init__(
        self, name: Callable[[int], str | None], contribution: Callable[[str], T], nothing: T
    ) -> None:
        super().__init__()
        self._name = name
        self._contribution = contribution
        self._nothing = nothing

    def __missing__(self, token_id: int) -> T:
        token = self._name(token_id)
        if token is None:
            return self._nothing
        value = self[token_id] = self._contribution(token)
        return value

    def once(self, token_id: int) -> T:
        """A contribution that is not kept."""
        token = self._name(token_id)
        return self._nothing if token is None else self._contribution(token)


def hide(contribution: Callable[[str], T], hidden: Collection[str], nothing: T) -> Callable[[str], T]:
    """`contribution`, except that tokens in `hidden` (by content, as in the library) give `nothing`."""
    return lambda token: nothing if token in hidden else contribution(token)
