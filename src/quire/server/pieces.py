"""JSON in pieces: a large answer is encoded while it is sent, so that it never occupies memory as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from quire.answers import AnswerPart
from quire.engine.api import StreamDelta
from quire.logprobs import PositionLogprobs

Pieces = Iterable[bytes]
T = TypeVar("T")

PIECE_BYTES = 64 * 1024
_SLICE_CHARS = 16 * 1024
_SLICE_NUMBERS = 4096
SHORT_CHARS = 1024  # of one token: nearly all texts are far shorter
_SLICE_CANDIDATES = 128  # of logprobs; one may take a kilobyte of JSON
_encode = msgspec.json.Encoder().encode


def value(plain: object) -> Pieces:
    """A small value."""
    return (_encode(plain),)


def fields(named: Iterable[tuple[str, Pieces]]) -> Iterator[bytes]:
    """An object with these fields."""
    before = b"{"
    for name, pieces in named:
        yield before + b'"' + name.encode() + b'":'
        yield from pieces
        before = b","
    yield b"}" if before == b"," else b"{}"


def items(each: Iterable[Pieces]) -> Iterator[bytes]:
    """An array of these items."""
    before = b"["
    for pieces in each:
        yield before
        yield from pieces
        before = b","
    yield b"]" if before == b"," else b"[]"


def slices(of: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """One array of the elements of several sequences, each sequence encoded in one call."""
    return items((_encode(some)[1:-1],) for some in of if some)


def numbers(of: Sequence[int]) -> Iterator[bytes]:
    """An array of integers."""
    starts = range(0, len(of), _SLICE_NUMBERS)
    return slices(list(of[start : start + _SLICE_NUMBERS]) for start in starts)


def text(*utf8: bytes | bytearray) -> Iterator[bytes]:
    """A string, given as parts in UTF-8 that don't split characters."""
    yield b'"'
    for part in utf8:
        start, end = 0, len(part)
        while start < end:
            stop = min(end, start + _SLICE_CHARS)
            while stop < end and part[stop] & 0xC0 == 0x80:  # do not cut a character
                stop -= 1
            yield _encode(part[start:stop].decode())[1:-1]
            start = stop
    yield b'"'


def batches(of: Iterable[T], width: int) -> Iterator[list[T]]:
    """Elements in lists, shorter ones where each element holds `width` logprobs."""
    rest, size = iter(of), max(1, _SLICE_CANDIDATES // width)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def width_of(table: Sequence[PositionLogprobs]) -> int:
    """Number of candidates per position."""
    return len(table[0]) if table else 1


def gathered(pieces: Pieces) -> Iterator[bytes]:
    """The same bytes in pieces of at least PIECE_BYTES, except the last."""
    parts: list[bytes] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


def is_portion(delta: StreamDelta) -> bool:
    """Whether a delta with anything in it is the only one of its `portions`."""
    fits = len(delta.token_ids) <= _step(delta.logprobs) and len(delta.text) <= _SLICE_CHARS
    return fits and (delta.logprobs is None or len(delta.logprobs) >= len(delta.token_ids))


def _step(table: Sequence[PositionLogprobs] | None) -> int:
    """The tokens of a portion."""
    return _SLICE_NUMBERS if table is None else max(1, _SLICE_CANDIDATES // width_of(table))


def portions(delta: StreamDelta) -> Iterator[StreamDelta]:
    """Parts of a delta that grew while its reader was slow: text, ids and logprobs, each in order. An answer that is
    read in parts has these before its ids. None of a delta with nothing in it.
    """
    table, ids, text = delta.logprobs, delta.token_ids, delta.text
    if not (ids or text or delta.parts or delta.finish_reason):
        return
    if is_portion(delta):
        yield delta
        return
    if table is not None and (given := len(ids) - len(table)) > 0:  # of the output before, by another engine
        yield from portions(StreamDelta(delta.index, text, ids[:given], parts=delta.parts))
        rest = replace(delta, text="", token_ids=ids[given:], parts=None if delta.parts is None else [])
        yield from portions(rest)
        return
    step = _step(table)
    parts: list[AnswerPart] | None = None
    if delta.parts is not None:
        yield StreamDelta(delta.index, text, [], parts=delta.parts)
        text, parts = "", []
    count = max(-(-len(ids) // step), -(-len(text) // _SLICE_CHARS))
    for at in range(count):
        some = slice(at * step, (at + 1) * step)
        chars = text[at * _SLICE_CHARS : (at + 1) * _SLICE_CHARS]
        part = StreamDelta(delta.index, chars, ids[some], None if table is None else table[some], parts=parts)
        if at == count - 1:
            part.finish_reason, part.stop_reason = delta.finish_reason, delta.stop_reason
        yield part
