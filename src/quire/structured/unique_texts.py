"""Keys that come once in their object, and items that come once in their array: beside a grammar, which cannot tell.

`compile_json_schema` writes every string and every item that must be unique in one way only, so equal values have equal
bytes. The text of an answer is followed through its objects and arrays; tokens that would complete a text which the
innermost one has already are taken out of the masks.

An answer may hold several JSON texts, between others. One begins at a bracket behind which the grammar allows what only
JSON allows: a line break and as many spaces as its white space may have, but not more. So what a grammar also allows as
free text is free. The white space of an array of unique items may have one space more, which tells it from others.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

from quire.structured.grammar_limits import MAX_INDENTATION, UNIQUE_BYTES
from quire.structured.unique_needs import UniqueNeeds
from quire.structured.unique_tokens import Line, UniqueTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher

_TEXT_BYTES = 64  # of a text that is kept, besides its bytes
_MAX_ALIVE = 1024

_PLAIN = re.compile(rb'[^"\\]*')
_BRACKET = re.compile(rb"[{\[]")
_SIGN = re.compile(rb'["{}\[\],]')
_ITEM = re.compile(rb'["{}\[\],]|[-0-9a-z]')
_SCALAR_END = re.compile(rb"[\s,\]]")
_ENDS = (b",", b"]", b" ", b"\n", b"\r")  # what may follow a scalar
_GAP = b"\n" + b" " * MAX_INDENTATION


class _Level:
    """An open object or array, and the texts of its members so far, in order."""

    __slots__ = ("alive", "array", "ending", "held", "member", "short", "tracked", "unique", "used", "whole")

    def __init__(self, array: bool, tracked: bool) -> None:
        self.array, self.tracked = array, tracked
        self.member = tracked  # a key or an item comes next
        self.unique: bool | None = (
            None  # whether the array must be one of unique items, if that is known of this item
        )
        self.used: list[bytes] = []  # with their quotes
        self.held = 0
        self.short: list[bytes] = []  # those that a token may hold behind their first quote
        self.whole: list[int] = []  # tokens that hold one of them from end to end
        self.ending: list[int] = []  # tokens that end with the beginning of one of them
        self.alive: dict[bytes, int] = {}  # beginnings of texts, and a token that leads out of those used

    def copy(self) -> _Level:
        made = _Level(self.array, self.tracked)
        made.member, made.used, made.held = self.member, list(self.used), self.held
        made.unique = self.unique
        made.short, made.whole, made.ending = list(self.short), list(self.whole), list(self.ending)
        made.alive = self.alive  # shared: what it says is checked
        return made

    def near(self, text: bytes) -> list[bytes]:
        """Used texts that begin with a text."""
        return self.used[bisect_left(self.used, text) : bisect_left(self.used, text + b"\xff")]

    def has(self, text: bytes) -> bool:
        """Whether a text is used."""
        at = bisect_left(self.used, text)
        return at < len(self.used) and self.used[at] == text

    def touches(self, text: bytes) -> bool:
        """Whether a text is the beginning of a used one, or goes on behind one."""
        if self.near(text):
            return True
        if text[0] != 0x22:
            end = _SCALAR_END.search(text)
            return end is not None and self.has(text[: end.start()])
        at = bisect_left(self.used, text)
        return any(text.startswith(one) for one in self.used[max(0, at - 1) : at])


_Place = tuple[int, int]  # of a byte: which token, and where in it


class UniqueTexts:
    """Follows the tokens of one sequence."""

    __slots__ = (
        "_begun", "_escape", "_held", "_levels", "_needs", "_path", "_string", "_taken", "_tokens", "_unique_from",
    )  # fmt: skip

    def __init__(self, tokens: UniqueTokens, needs: UniqueNeeds) -> None:
        self._tokens, self._needs = tokens, needs
        self._taken = array("i")  # all tokens
        self._begun: list[_Place] = []  # where JSON has begun
        self._unique_from: list[_Place] = []  # where arrays of unique items have
        self._clear()

    def _clear(self) -> None:
        self._levels: list[_Level] = []
        self._string = self._escape = False
        self._path = b""  # of the key or item that is being written
        self._held = 0  # bytes of the texts of all levels

    def copy(self) -> UniqueTexts:
        """One of its own at the same place."""
        made = UniqueTexts.__new__(UniqueTexts)
        made._tokens, made._needs = self._tokens, self._needs
        made._taken, made._begun = self._taken[:], list(self._begun)
        made._unique_from = list(self._unique_from)
        made._levels = [level.copy() for level in self._levels]
        made._string, made._escape, made._path = self._string, self._escape, self._path
        made._held = self._held
        return made

    def step(self, token: int, matcher: LLMatcher) -> bool:
        """Follow a token; false if it completes a used text. The matcher is the one before it."""
        piece, fresh = self._tokens[token], True
        if self._string and not self._escape and b'"' not in piece and b"\\" not in piece:
            if self._path:
                self._path += piece
        else:
            fresh = self._follow(piece, matcher)
        self._taken.append(token)
        return fresh

    @property
    def full(self) -> bool:
        """Whether it holds all that it may."""
        return self._held + len(self._path) > UNIQUE_BYTES

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        taken = self._taken[:-count]
        for places in (self._begun, self._unique_from):
            while places and places[-1][0] >= len(taken):
                places.pop()
        self._clear()
        self._taken = array("i")
        for token in taken:
            self._follow(self._tokens[token], None)
            self._taken.append(token)

    # -- the text ------------------------------------------------------------------------------------

    def _follow(self, piece: bytes, matcher: LLMatcher | None) -> bool:
        """Go on through the bytes of a token; false if they complete a text that is used already."""
        at, fresh = 0, True
        while at < len(piece):
            if self._string:
                at, closed = self._through_string(piece, at)
                if closed and self._path:
                    fresh = self._add() and fresh
            elif self._path:
                end = _SCALAR_END.search(piece, at)
                self._path += piece[at : end.start() if end else len(piece)]
                at = end.start() if end else len(piece)
                if end is not None:
                    fresh = self._add() and fresh
            else:
                at = self._to_sign(piece, at, matcher)
        return fresh

    def _through_string(self, piece: bytes, at: int) -> tuple[int, bool]:
        """The place behind what the piece has of a string, and whether it ends there."""
        closed = False
        if self._escape:
            self._escape, end = False, at + 1
        else:
            found = _PLAIN.match(piece, at)
            assert found is not None
            end = found.end()
            if end < len(piece):
                closed = piece[end] == 0x22
                self._escape, end = not closed, end + 1
        self._string = not closed
        if self._path:
            self._path += piece[at:end]
        return end, closed

    def _to_sign(self, piece: bytes, at: int, matcher: LLMatcher | None) -> int:
        """The place behind the next sign between texts."""
        level = self._levels[-1] if self._levels else None
        signs = _BRACKET if level is None else _ITEM if level.array and level.member else _SIGN
        found = signs.search(piece, at)
        if found is None:
            return len(piece)
        at, sign = found.start(), found[0]
        if level is None:
            if self._begins(piece, at, matcher):
                self._open(piece, at, matcher)
        elif sign in b"{[":
            level.member = False
            self._open(piece, at, matcher)
        elif sign in b"}]":
            self._held -= self._levels.pop().held
        elif sign == b",":
            level.member, level.unique = level.tracked, None
        elif sign == b'"':
            self._string = True
            self._path = sign if level.member else b""
        else:
            self._path = sign
        return at + 1

    def _open(self, piece: bytes, at: int, matcher: LLMatcher | None) -> None:
        """Begin an object or array."""
        array = piece[at] == 0x5B
        tracked = not array
        if array and self._needs.items:
            place = len(self._taken), at
            tracked = (
                place in self._unique_from if matcher is None else self._unique(matcher, piece[: at + 1])
            )
            if tracked and matcher is not None:
                self._unique_from.append(place)
        self._levels.append(_Level(array, tracked))

    def _begins(self, piece: bytes, at: int, matcher: LLMatcher | None) -> bool:
        """Whether JSON begins at a bracket."""
        place = len(self._taken), at
        if matcher is None:
            return place in self._begun
        head = piece[: at + 1]
        if self._needs.compact:
            likely = piece[at] == 0x7B and any(self._allows(matcher, head, end) for end in (b'"', b"}"))
            only = likely and not self._allows(matcher, head, b" ")
        else:
            only = self._allows(matcher, head, _GAP) and not self._allows(matcher, head, _GAP, b"  ")
        if only:
            self._begun.append(place)
        return only

    def _allows(self, matcher: LLMatcher, *texts: bytes) -> bool:
        spelled = list[int]()
        for text in texts:
            found = self._tokens.spelled(text)
            if found is None:
                return False
            spelled += found
        return matcher.validate_tokens(spelled) == len(spelled)

    def _add(self) -> bool:
        """Note the text that has been completed; false if it is used already."""
        level, text = self._levels[-1], self._path
        self._path, level.member = b"", False
        if level.has(text):
            return False
        insort(level.used, text)
        level.held += len(text) + _TEXT_BYTES
        self._held += len(text) + _TEXT_BYTES
        if text[0] == 0x22 and text[1:] in self._tokens.closing:
            level.short.append(text)
        level.whole += self._tokens.whole.get(text, ())
        if self._needs.tails:
            for end in range(2, len(text)):
                level.ending += self._tokens.ending.get(text[:end], ())
        return True

    # -- masks ---------------------------------------------------------------------------------------

    def filter(self, line: Line, matcher: LLMatcher) -> None:
        """Take the tokens out of a mask that complete a used text, and those behind which no other is possible."""
        self._clear_used(line, matcher)
        if self._needs.tails and self._levels:
            known = dict[bytes, bool]()
            for token, path in self._risky(line).items():
                if not self._alive(token, path, matcher, known):
                    _drop(line, token)

    def _clear_used(self, line: Line, matcher: LLMatcher) -> None:
        for token in self._tokens.whole.get(b"", ()):
            self._try(line, token, matcher)
        for level in self._levels:
            for token in level.whole:
                self._try(line, token, matcher)
        level = self._levels[-1] if self._levels else _NO_LEVEL
        path = self._path
        if not level.used or not path:
            return
        closing = self._tokens.closing
        for text in level.short if path == b'"' else level.near(path):
            rest = text[len(path) :]
            if text[0] == 0x22 and len(rest) > 1 and rest not in closing:
                continue
            ends = [end for end in _ends(text, rest) if len(end) == 1 or end in closing]
            if ends and level.array and level.unique is None:
                level.unique = self._unique(matcher, rest)
            if ends and level.unique is not False:
                for end in ends:
                    self._tokens.clear(line, end)

    def _try(self, line: Line, token: int, matcher: LLMatcher) -> None:
        """Take a token out that completes a used text on its way."""
        if _has(line, token) and not self.copy()._follow(self._tokens[token], matcher):
            _drop(line, token)

    def _unique(self, matcher: LLMatcher, before: bytes) -> bool:
        """Whether the array behind or around a text may be one of unique items."""
        return self._allows(matcher, before, _GAP, b" ")

    def _risky(self, line: Line) -> dict[int, bytes]:
        """Allowed tokens after which the text is the beginning of one that is used, and this beginning; b"" if they end
        other texts first."""
        found = {token: b"" for level in self._levels for token in level.ending if _has(line, token)}
        level, path = self._levels[-1], self._path
        if path or level.member:
            begins = set[bytes]()
            for text in level.near(path):
                begins.update(text[:end] for end in range(len(path) + 1, len(text) + (text[0] != 0x22)))
            for begin in sorted(begins):
                for token in self._tokens.exact(begin[len(path) :]):
                    if _has(line, token):
                        found[token] = begin
        return found

    def _alive(self, token: int, path: bytes, matcher: LLMatcher, known: dict[bytes, bool]) -> bool:
        """Whether a text that is not used can be completed behind a token; `known` of beginnings."""
        if path and path not in known and self._is_certain(token, path, matcher):
            known[path] = True
        if not path or path not in known:
            after = self.copy()
            after._follow(self._tokens[token], matcher)
            path = after._path
            if not path or not after._levels[-1].near(path):
                return True
            if path not in known:
                known[path] = after._goes_on(token, matcher, known)
        return known[path]

    def _is_certain(self, token: int, path: bytes, matcher: LLMatcher) -> bool:
        """Whether what is known is enough: it can end as it is, or a token goes on that did before. Items of an array
        have one schema, so there that token is allowed still."""
        level = self._levels[-1]
        way, end = [token], path
        while (witness := level.alive.get(end)) is not None:
            way.append(witness)
            end += self._tokens[witness]
            if not level.touches(end):
                return level.array or matcher.validate_tokens(way) == len(way)
        quote = self._tokens.spelled(b'"')
        return (
            path[0] == 0x22
            and len(path) > 1
            and quote is not None
            and not level.has(path + b'"')
            and matcher.validate_tokens([token, *quote]) == 2
        )

    def _goes_on(self, token: int, matcher: LLMatcher, known: dict[bytes, bool]) -> bool:
        """Behind the token: whether another one leads to no used text, or one that does goes on."""
        fork, line = matcher.deep_copy(), np.zeros(len(self._tokens) // 32 + 1, np.uint32)
        fork.consume_token(token)
        fork.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        self._clear_used(line, fork)
        risky = self._risky(line)
        for one in risky:
            _drop(line, one)
        # The last one: a rare token, so that it leads to no used text for long.
        last = np.flatnonzero(line)[-1:].tolist()
        on = next((32 * word + int(line[word]).bit_length() - 1 for word in last), None)
        if on is None:
            on = next(
                (one for one, path in risky.items() if path and self._alive(one, path, fork, known)), None
            )
        if on is None:
            return any(self._alive(one, path, fork, known) for one, path in risky.items() if not path)
        alive = self._levels[-1].alive
        if len(alive) >= _MAX_ALIVE:
            alive.clear()
        alive[self._path] = on
        return True


_NO_LEVEL = _Level(False, False)


def _ends(text: bytes, rest: bytes) -> list[bytes]:
    """The rest of a text with what ends it: the quote that it has, or a sign behind a scalar."""
    return [rest] if text[0] == 0x22 else [rest + end for end in _ENDS]


def _has(line: Line, token: int) -> bool:
    return bool(int(line[token >> 5]) >> (token & 31) & 1)


def _drop(line: Line, token: int) -> None:
    line[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))
