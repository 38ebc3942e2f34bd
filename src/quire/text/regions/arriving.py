"""The text that a reader has and has not read: waiting for more, and giving text back that was no call."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable

from quire.answers import AnswerPart, PartKind
from quire.text.regions.markers import Markers
from quire.text.regions.scanners import Delimiters

Pausing = Generator[None, None, None]  # runs until it needs more text
MAX_NAME = 256  # characters of a name, an id or a key

_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"[^\s<>{}\[\]()\"'=,\ud800-\udfff]*")
_KEY = re.compile(r"[^\s<>\"'\ud800-\udfff]*")
_QUOTED = re.compile(r'(?:[^"\\\x00-\x1f\ud800-\udfff]|\\.)*')


def is_name(text: str) -> bool:
    """Whether a reader takes a text as a name in the head of a call."""
    return 0 < len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


def is_key(text: str) -> bool:
    """Whether a reader takes a text as the name of an argument in a tag."""
    return 0 < len(text) <= MAX_NAME and _KEY.fullmatch(text) is not None


class MalformedError(Exception):
    """The text is not a call of the format."""


class ArrivingText:
    """Text that arrives in pieces, read by generators that stop where they need more.

    While a region is read, `_unshown` has what was taken and is in no part yet: if the region turns out to be no call,
    that is text.
    """

    __slots__ = ("_at", "_ended", "_markers", "_parts", "_text", "_unshown")

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._text, self._at, self._ended = "", 0, False
        self._unshown: list[str] = []
        self._parts: list[AnswerPart] = []

    def _take(self, end: int) -> str:
        """Read up to `end`."""
        piece = self._text[self._at : end]
        self._at = end
        if piece:
            self._unshown.append(piece)
        return piece

    def _unread(self, before: int = 0) -> None:
        """Put back what was taken and is in no part, but for its first pieces."""
        back = "".join(self._unshown[before:])
        del self._unshown[before:]
        if len(back) > self._at:
            self._text, self._at = back + self._text[self._at :], 0
        else:
            self._at -= len(back)

    def _peek(self) -> Generator[None, None, str]:
        """The next character; "" at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def _run(self, pattern: re.Pattern[str], limit: int = MAX_NAME) -> Generator[None, None, str]:
        """The characters that a pattern for any number of them takes, at most `limit`."""
        pieces: list[str] = []
        left = limit + 1
        while True:
            match = pattern.match(self._text, self._at)
            pieces.append(self._take(min(match.end() if match else self._at, self._at + left)))
            left -= len(pieces[-1])
            if left <= 0:
                raise MalformedError
            if self._at < len(self._text) or self._ended:
                return "".join(pieces)
            yield

    def _space(self) -> Pausing:
        while True:
            match = _SPACE.match(self._text, self._at)
            self._take(match.end() if match else self._at)
            if self._at < len(self._text) or self._ended:
                return
            yield

    def _word(self, word: str) -> Generator[None, None, bool]:
        """Whether the word comes next; it is taken then."""
        while True:
            have = self._text[self._at : self._at + len(word)]
            if have == word:
                self._take(self._at + len(word))
                return True
            if self._ended or not word.startswith(have):
                return False
            yield

    def _fixed(self, text: str) -> Pausing:
        """A text of the spec, with any white space."""
        for word in text.split():
            yield from self._space()
            if not (yield from self._word(word)):
                raise MalformedError

    def _maybe(self, text: str) -> Generator[None, None, bool]:
        """Whether a text of the spec comes next; it is taken then, and only white space otherwise."""
        words = text.split()
        yield from self._space()
        before = len(self._unshown)
        for word in words:
            yield from self._space()
            if not (yield from self._word(word)):
                self._unread(before)
                return False
        return bool(words)

    def _name(self) -> Generator[None, None, str]:
        yield from self._space()
        name = yield from self._run(_NAME)
        if not name:
            raise MalformedError
        return name

    def _key(self) -> Generator[None, None, str]:
        """The name of an argument in a tag."""
        yield from self._space()
        key = yield from self._run(_KEY)
        if not key:
            raise MalformedError
        return key

    def _quoted(self) -> Generator[None, None, str]:
        """A short JSON string, between its quotes, still escaped."""
        if not (yield from self._word('"')):
            raise MalformedError
        pieces: list[str] = []
        while True:
            pieces.append((yield from self._run(_QUOTED, MAX_NAME - sum(map(len, pieces)))))
            if (yield from self._word('"')):
                return "".join(pieces)
            # a backslash whose character has not arrived, or a character that no string has
            if self._ended or self._text[self._at :] != "\\":
                raise MalformedError
            yield

    def _until(self, ends: Delimiters) -> Generator[None, None, tuple[str, str | None]]:
        """The next piece of text before any of `ends`, and which one follows it; None if neither is known yet.

        The piece and the end are taken. At the end of the text the last piece comes with the end "".
        """
        start, end = ends.find(self._text, self._at, self._ended)
        piece = self._take(start)
        if end is not None:
            self._take(self._at + len(end))
            return piece, end
        if self._ended:
            return piece, ""
        if not piece:
            yield
        return piece, None

    def _show(self, kind: PartKind, text: str, call: int = 0) -> None:
        """Add text to the parts; text that goes on with the last part is joined to it."""
        if not text:
            return
        if self._parts and (last := self._parts[-1]).kind is kind and last.call == call:
            # with one reference a string grows in place; with two it would be copied for every piece
            whole, last.text = last.text, ""
            whole += text
            last.text = whole
        else:
            self._parts.append(AnswerPart(kind, text, call))


def words(texts: Iterable[str]) -> list[str]:
    """Texts of a spec without the white space around them, and with the newline that the template writes before."""
    return [word for text in texts for word in (text.strip(), text.rstrip()) if word]
