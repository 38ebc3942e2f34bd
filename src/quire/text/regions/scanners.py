"""Scanners that take text in any pieces and look at each character a bounded number of times."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_DEPTH = 256  # of nested values in arguments

_SPACE = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_BETWEEN = frozenset(
    ("value", "first_item", "first_key", "key", "colon", "more")
)  # where white space may stand
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# State of a number -> class of the next character -> state; the digits from 1 on are one class, "9".
_NUMBER = {
    "-": {"0": "z", "9": "i"},
    "z": {".": ".", "e": "e"},
    "i": {"0": "i", "9": "i", ".": ".", "e": "e"},
    ".": {"0": "f", "9": "f"},
    "f": {"0": "f", "9": "f", "e": "e"},
    "e": {"+": "s", "-": "s", "0": "x", "9": "x"},
    "s": {"0": "x", "9": "x"},
    "x": {"0": "x", "9": "x"},
}
_NUMBER_CLASS = {"E": "e", **dict.fromkeys("12345678", "9")}
_WHOLE_NUMBERS = frozenset("zifx")


class JsonScanner:
    """Follows one JSON value. After `feed`, the value goes on unless `done` or `failed`."""

    __slots__ = ("_expect", "_left", "_number", "_stack", "_states", "done", "failed")

    def __init__(self) -> None:
        self._stack: list[str] = []  # the closers of open containers
        self._expect = "value"
        self._left = ""  # of a literal
        self._number = ""
        self.done = self.failed = False

    def feed(self, text: str, at: int = 0) -> int:
        """Follow `text` from `at`; returns the end of what belongs to the value."""
        while not self.done:
            if self._expect in _BETWEEN:
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches everywhere
            if at == len(text):
                break
            following = getattr(self, f"_{self._expect}")(text, at)
            if following < 0:
                self.failed = True
                return at
            at = following
        return at

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._expect = "string"
        elif char in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return -1
            self._stack.append("}" if char == "{" else "]")
            self._expect = "first_key" if char == "{" else "first_item"
        elif char in _LITERALS:
            self._left, self._expect = _LITERALS[char], "literal"
        elif char == "-" or "0" <= char <= "9":
            self._number = {"-": "-", "0": "z"}.get(char, "i")
            self._expect = "digits"
        else:
            return -1
        return at + 1

    def _first_item(self, text: str, at: int) -> int:
        if text[at] == "]":
            return self._close(at)
        return self._value(text, at)

    def _first_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._close(at)
        return self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        if text[at] != '"':
            return -1
        self._expect = "key_string"
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        self._expect = "value"
        return at + 1 if text[at] == ":" else -1

    def _more(self, text: str, at: int) -> int:
        if text[at] == ",":
            self._expect = "key" if self._stack[-1] == "}" else "value"
            return at + 1
        return self._close(at) if text[at] == self._stack[-1] else -1

    def _close(self, at: int) -> int:
        self._stack.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._expect = "more"
        self.done = not self._stack

    def _string(self, text: str, at: int) -> int:
        at = _IN_STRING.match(text, at).end()  # type: ignore[union-attr]  # matches everywhere
        if at == len(text):
            return at
        if text[at] == "\\":
            self._expect = self._expect.replace("string", "escape")
        elif text[at] == '"':
            if self._expect == "string":
                self._end_value()
            else:
                self._expect = "colon"
        else:
            return -1
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        char = text[at]
        if char == "u":
            self._left, self._expect = "uuuu", self._expect.replace("escape", "unicode")
        elif char in '"\\/bfnrt':
            self._expect = self._expect.replace("escape", "string")
        else:
            return -1
        return at + 1

    def _unicode(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return -1
        self._left = self._left[1:]
        if not self._left:
            self._expect = self._expect.replace("unicode", "string")
        return at + 1

    _key_string, _key_escape, _key_unicode = _string, _escape, _unicode

    def _literal(self, text: str, at: int) -> int:
        if text[at] != self._left[0]:
            return -1
        self._left = self._left[1:]
        if not self._left:
            self._end_value()
        return at + 1

    def _digits(self, text: str, at: int) -> int:
        while at < len(text):
            char = text[at]
            following = _NUMBER[self._number].get(_NUMBER_CLASS.get(char, char))
            if following is None:
                if self._number not in _WHOLE_NUMBERS:
                    return -1
                self._end_value()
                return at
            self._number = following
            at += 1
        return at


class PythonScanner:
    """Finds the end of a literal of Python: a comma or a closing bracket outside of brackets and strings."""

    __slots__ = ("_quote", "_stack", "done", "failed")
    _outside = re.compile(r"[^\"'()\[\]{},]*")
    _inside: dict[str, re.Pattern[str]] = {  # noqa: RUF012
        '"': re.compile(r'[^"\\]*'),
        "'": re.compile(r"[^'\\]*"),
    }
    _brackets: dict[str, str] = {"(": ")", "[": "]", "{": "}"}  # noqa: RUF012

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._quote = ""  # of the open string; with a backslash behind it, an escape is open
        self.done = self.failed = False

    def feed(self, text: str, at: int = 0) -> int:
        """Follow `text` from `at`; returns the end of what belongs to the value."""
        size = len(text)
        while at < size:
            if len(self._quote) == 2:
                self._quote = self._quote[0]
                at += 1
                continue
            pattern = self._inside[self._quote] if self._quote else self._outside
            at = pattern.match(text, at).end()  # type: ignore[union-attr]  # matches everywhere
            if at == size:
                break
            char = text[at]
            if self._quote:
                self._quote = "" if char == self._quote else self._quote + "\\"
            elif char in "\"'":
                self._quote = char
            elif char in self._brackets:
                self._stack.append(self._brackets[char])
            elif not self._stack and char in ",)":
                self.done = True
                return at
            elif char != "," and (not self._stack or self._stack.pop() != char):
                self.failed = True
                return at
            if len(self._stack) > MAX_DEPTH:
                self.failed = True
                return at
            at += 1
        return at


class Delimiters:
    """Finds the first of several texts, and where a text may begin that its piece ends in."""

    __slots__ = ("_final", "_growing", "_words")

    def __init__(self, words: Iterable[str]) -> None:
        ordered = sorted({word for word in words if word}, key=lambda word: (-len(word), word))
        self._words = frozenset(ordered)
        whole = [re.escape(word) for word in ordered]
        self._final = re.compile("|".join(whole) or "(?!)")
        # for each position: the longest text first, and one that is still growing before any shorter one
        growing = [
            f"{word}|{_beginning(text)}\\Z" if len(text) > 1 else word
            for word, text in zip(whole, ordered, strict=True)
        ]
        self._growing = re.compile("|".join(growing) or "(?!)")

    def may_begin_in(self, text: str) -> bool:
        """Whether any of the texts, or the beginning of one, is in a piece of text."""
        return self._growing.search(text) is not None

    def find(self, text: str, at: int, ended: bool) -> tuple[int, str | None]:
        """Where the first text begins, and which; or where a text may begin (the end if nowhere), and None."""
        match = (self._final if ended else self._growing).search(text, at)
        if match is None:
            return len(text), None
        word = match.group()
        return match.start(), word if word in self._words else None


def _beginning(word: str) -> str:
    """A pattern for the proper beginnings of a word, the longest first."""
    return f"(?:{'|'.join(re.escape(word[:size]) for size in range(len(word) - 1, 0, -1))})"
