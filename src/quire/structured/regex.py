"""Regular expressions: what Python, JavaScript and Rust write alike, matched by the whole answer.

Texts, `.` (any character but a line feed), classes `[a-z]`, `\\d \\w \\s` (ASCII) and `\\p{L}`, groups, `|`,
repetitions with or without `?` (laziness changes nothing when the whole text must match), `^` and `$` at the ends,
flags `i` and `s`. What is not a regular language, or needs the place in the text, is refused by name.
"""

from __future__ import annotations

import re

from quire.structured.ask import GrammarError
from quire.structured.character_rules import (
    ANY,
    LAST,
    MAX_DEPTH,
    REPEATS,
    Node,
    OneOf,
    Range,
    Text,
    Times,
    check_repeats,
    choice,
    merge,
    negate,
    series,
)

_COUNT = re.compile(r"\{(\d{0,10})(?:(,)(\d{0,10}))?\}", re.A)
_CLASS_NAME = re.compile(r"\{(\^?[A-Za-z][A-Za-z_ -]{0,40}(?:=[A-Za-z][A-Za-z_ -]{0,40})?)\}|([A-Z])")
_GROUP_NAME = re.compile(r"(?:P?<|')([A-Za-z_]\w*)[>']")
_FLAGS = re.compile(r"([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")
DIGITS: tuple[Range, ...] = ((0x30, 0x39),)
WORD: tuple[Range, ...] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: tuple[Range, ...] = ((0x09, 0x0D), (0x20, 0x20))
_CLASSES = {"d": DIGITS, "w": WORD, "s": SPACE}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "e": "\x1b"}
_LINE = OneOf(negate([(0x0A, 0x0A)]))
_HEX = {"x": 2, "u": 4, "U": 8}
_HEX_DIGITS = {
    kind: re.compile(rf"\{{([0-9a-fA-F]{{1,8}})\}}|([0-9a-fA-F]{{{count}}})") for kind, count in _HEX.items()
}
_LAST_CASED = 0x1E943  # the last character that has a lower and an upper case
_LOOK = {
    "=": "look-ahead (?=", "!": "negative look-ahead (?!", "<=": "look-behind (?<=", "<!": "negative look-behind (?<!",
}  # fmt: skip
_GROUPS = {
    ">": "an atomic group (?>", "#": "a comment (?#", "P": "a reference to a group (?P=", "(": "a condition (?(",
}  # fmt: skip


def parse_regex(text: str, field: str = "regex") -> Node:
    """What the whole text must be. Raises GrammarError naming the construct and its place."""
    node = _Expression(text, field).parse()
    check_repeats(node, field)
    return node


class _Expression:
    def __init__(self, text: str, field: str) -> None:
        self._text, self._field, self._at, self._depth = text, field, 0, 0
        self._fold = self._dotall = False

    def parse(self) -> Node:
        node = self._either()
        if self._at < len(self._text):
            raise self._error("')' without a matching '('")
        return node

    def _error(self, message: str, at: int | None = None) -> GrammarError:
        return GrammarError(self._field, f"at character {self._at if at is None else at}: {message}")

    def _unsupported(self, what: str, at: int) -> GrammarError:
        return self._error(f"{what} is not supported", at)

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        if found:
            self._at += len(text)
        return found

    def _either(self) -> Node:
        flags = self._fold, self._dotall
        parts = [self._then()]
        while self._take("|"):
            parts.append(self._then())
        self._fold, self._dotall = flags
        return choice(parts)

    def _then(self) -> Node:
        """Parts up to the end of an alternative; texts that follow each other are one."""
        parts: list[Node] = []
        begins = self._at
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            place = self._at
            if self._take("^"):
                if self._depth or place != begins:
                    raise self._unsupported("^ inside the expression", place)
            elif self._take("$"):
                if self._depth or self._text[self._at : self._at + 1] not in {"", "|"}:
                    raise self._unsupported("$ inside the expression", place)
            elif self._flags():
                begins = self._at if begins == place else begins
            else:
                node = self._repeated(self._one())
                if isinstance(node, Text) and parts and isinstance(parts[-1], Text):
                    node = Text(parts.pop().text + node.text)  # type: ignore[union-attr]
                parts.append(node)
        return series(parts)

    def _flags(self) -> bool:
        """Whether flags such as (?i) stood here, for the rest of the group."""
        if not self._text.startswith("(?", self._at):
            return False
        match = _FLAGS.match(self._text, self._at + 2)
        if match is None or match[3] == ":":
            return False
        self._set_flags(match)
        self._at = match.end()
        return True

    def _set_flags(self, match: re.Match[str]) -> None:
        for letters, value in ((match[1], True), (match[2] or "", False)):
            for letter in letters:
                if letter == "i":
                    self._fold = value
                elif letter == "s":
                    self._dotall = value
                else:
                    raise self._unsupported(f"the flag {letter}", match.start())

    def _one(self) -> Node:
        char, place = self._text[self._at], self._at
        self._at += 1
        if char == "(":
            return self._group(place)
        if char == "[":
            return self._class(place)
        if char == ".":
            return ANY if self._dotall else _LINE
        if char == "\\":
            return self._escape(place)
        if char in "*+?" or (char == "{" and _COUNT.match(self._text, place)):
            raise self._error(f"nothing to repeat before {char!r}", place)
        return self._char(char)

    def _char(self, char: str) -> Node:
        if self._fold and (folded := _cases(char)) != {char}:
            return OneOf(merge((ord(c), ord(c)) for c in folded))
        return Text(char)

    def _group(self, place: int) -> Node:
        flags = self._fold, self._dotall
        if self._take("?"):
            rest = self._text[self._at : self._at + 2]
            for mark, name in _LOOK.items():
                if rest.startswith(mark):
                    raise self._unsupported(name, place)
            if (match := _FLAGS.match(self._text, self._at)) is not None:
                self._set_flags(match)
                self._at = match.end()
            elif (match := _GROUP_NAME.match(self._text, self._at)) is not None:
                self._at = match.end()
            else:
                raise self._unsupported(_GROUPS.get(rest[:1], f"the group (?{rest[:1]}"), place)
        elif self._take("*"):
            raise self._unsupported("a verb (*", place)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep", place)
        node = self._either()
        self._depth -= 1
        self._fold, self._dotall = flags
        if not self._take(")"):
            raise self._error("'(' is not closed", place)
        return node

    def _repeated(self, node: Node) -> Node:
        place = self._at
        char = self._text[self._at : self._at + 1]
        match = _COUNT.match(self._text, self._at) if char == "{" else None
        if char and char in "*+?":
            low, high = REPEATS[char]
            self._at += 1
        elif match is not None and (match[1] or match[3]):
            low = int(match[1] or 0)
            high = low if match[2] is None else int(match[3]) if match[3] else None
            if high is not None and high < low:
                raise self._error(f"the repetition {match[0]} has a maximum below its minimum", place)
            self._at = match.end()
        else:
            return node
        if self._take("+"):
            raise self._unsupported("a possessive repetition", place)
        self._take("?")  # laziness is about which text matches, not about whether one does
        if self._text[self._at : self._at + 1] in {"*", "+", "?"} or (
            (again := _COUNT.match(self._text, self._at)) and (again[1] or again[3])
        ):
            raise self._error("a repetition of a repetition; put the inner one in a group")
        return Times(node, low, high)

    def _escape(self, place: int) -> Node:
        if self._at == len(self._text):
            raise self._error("a backslash with nothing after it", place)
        kind = self._text[self._at]
        if kind.lower() in _CLASSES or kind in "pP":
            ranges, classes = self._class_escape(place)
            return OneOf(ranges, classes)
        if kind in "123456789":
            raise self._unsupported(f"a back-reference \\{kind}", place)
        if kind == "k":
            raise self._unsupported("a back-reference \\k", place)
        return self._char(self._char_escape(place))

    def _class_escape(self, place: int) -> tuple[tuple[Range, ...], tuple[str, ...]]:
        kind = self._text[self._at]
        self._at += 1
        if kind not in "pP":
            ranges = _CLASSES[kind.lower()]
            return (negate(ranges) if kind.isupper() else ranges), ()
        match = _CLASS_NAME.match(self._text, self._at)
        if match is None:
            raise self._error(f"\\{kind} without the name of a class, such as \\p{{L}}", place)
        self._at = match.end()
        return (), (f"\\{kind}{{{match[1] or match[2]}}}",)

    def _char_escape(self, place: int) -> str:
        """The character of an escape."""
        kind = self._text[self._at]
        self._at += 1
        if kind in "bB":
            raise self._unsupported(f"the word boundary \\{kind}", place)
        if kind == "c":
            letter = self._text[self._at : self._at + 1]
            if not (letter.isascii() and letter.isalpha()):
                raise self._error("\\c without a letter", place)
            self._at += 1
            return chr(ord(letter) % 32)
        if kind in _HEX:
            return self._hex(kind, place)
        if kind == "0" and self._text[self._at : self._at + 1].isdigit():
            raise self._unsupported("an octal escape", place)
        if kind in _CONTROLS:
            return _CONTROLS[kind]
        if kind.isascii() and kind.isalnum():
            raise self._unsupported(f"the escape \\{kind}", place)
        return kind

    def _hex(self, kind: str, place: int) -> str:
        match = _HEX_DIGITS[kind].match(self._text, self._at)
        if match is None:
            raise self._error(f"\\{kind} needs {_HEX[kind]} hexadecimal digits", place)
        self._at = match.end()
        point = int(match[1] or match[2], 16)
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._text, self._at)
        if (
            kind == "u" and 0xD800 <= point < 0xDC00 and low is not None
        ):  # a character as JavaScript writes it
            self._at = low.end()
            point = 0x10000 + ((point - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if point > LAST or 0xD800 <= point <= 0xDFFF:
            raise self._error(f"{self._text[place : self._at]} is not a character", place)
        return chr(point)

    def _class(self, place: int) -> Node:
        negated = self._take("^")
        ranges: list[Range] = []
        classes: list[str] = []
        if self._text[self._at : self._at + 1] == "]":
            raise self._error("an empty class; write \\] for the bracket", place)
        while not self._take("]"):
            low = self._class_part(place, ranges, classes)
            following = self._text[self._at : self._at + 2]
            if low is None or not following.startswith("-") or following == "-]":
                ranges += [(ord(low), ord(low))] if low is not None else []
                continue
            self._at += 1
            high = self._class_part(place, ranges, classes)
            if high is None:
                raise self._error(f"the range {low}- must end with a character, not a class", place)
            if high < low:
                raise self._error(f"the range {low}-{high} is out of order", place)
            ranges.append((ord(low), ord(high)))
        if self._fold:
            ranges += [(ord(c), ord(c)) for c in _folded(ranges)]
        if classes:
            return OneOf(merge(ranges), tuple(classes), negated)
        node = OneOf(negate(ranges) if negated else merge(ranges))
        if not node.ranges:
            raise self._error("the class matches no character", place)
        return node

    def _class_part(self, place: int, ranges: list[Range], classes: list[str]) -> str | None:
        """A character, or None after a class, which is added to the lists."""
        if self._at >= len(self._text):
            raise self._error("'[' is not closed", place)
        here = self._at
        char = self._text[here]
        self._at += 1
        if char == "[" and self._text[self._at : self._at + 1] in {":", ".", "="}:
            raise self._unsupported("a POSIX class such as [[:alpha:]]", here)
        if self._text.startswith(("&&", "--", "~~"), here) and self._text[here + 2 : here + 3] == "[":
            raise self._unsupported(f"the class operator {self._text[here : here + 2]}", here)
        if char != "\\":
            return char
        if self._at == len(self._text):
            raise self._error("a backslash with nothing after it", here)
        kind = self._text[self._at]
        if kind.lower() in _CLASSES or kind in "pP":
            more, named = self._class_escape(here)
            ranges += more
            classes += named
            return None
        if kind == "b":
            self._at += 1
            return "\b"
        return self._char_escape(here)


def _cases(char: str) -> set[str]:
    """A character in upper and lower case, where those are single characters."""
    return {c for c in (char, char.lower(), char.upper()) if len(c) == 1}


def _folded(ranges: list[Range]) -> set[str]:
    """The characters of ranges in both cases."""
    points = (point for low, high in ranges for point in range(low, min(high, _LAST_CASED) + 1))
    return {c for point in points if not 0xD800 <= point <= 0xDFFF for c in _cases(chr(point))}
