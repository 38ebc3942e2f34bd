"""GBNF, the grammar language of llama.cpp, and the EBNF that vLLM takes from xgrammar: one syntax, read here.

    root  ::= item ("," item)*      # a comment
    item  ::= "text" | [a-z_]{1,8} | [^\\n] | .

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md. The dialects differ in how a rule ends (at the end
of the line outside of brackets, or where the next one begins) and in names (EBNF has dots in them); what either accepts
is read as it means it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from quire.structured.ask import GrammarError
from quire.structured.character_rules import (
    ANY,
    LAST,
    MAX_DEPTH,
    REPEATS,
    Node,
    OneOf,
    RuleRef,
    Text,
    Times,
    check,
    check_repeats,
    choice,
    merge,
    negate,
    series,
)

START = "root"
_BEGIN = re.compile(r"^[ \t]*[\w.-]+[ \t]*(?:\[[^\]\n]*\])?\s*::=", re.M)
_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|\#[^\r\n]*)+)
    |(?P<define>::=)
    |(?P<text>"(?:[^"\\]|\\.)*")
    |(?P<oneof>\[(?:[^\]\\]|\\.)*\])
    |(?P<name>[\w-]+(?:\.[\w-]+)*)
    |(?P<count>\{[^{}]*\})
    |(?P<token>!?<[^<>\s]*>)
    |(?P<ahead>\(=)
    |(?P<mark>[()|*+?.])""",
    re.X | re.S | re.A,
)
_COUNT = re.compile(r"\{\s*(\d{1,10})\s*(?:(,)\s*(\d{1,10})?\s*)?\}", re.A)
_REFUSED = {
    "token": "a token ({})",
    "ahead": "look-ahead {}",
}
_UNENDED = {'"': "the string is not closed", "[": "'[' is not closed"}
_ESCAPES = {
    "n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "0": "\0",
}  # fmt: skip
_ITSELF = "\\\"'[]-^/?"
_HEX = {"x": 2, "u": 4, "U": 8}

Token = tuple[str, str, int]  # kind, text, place


def looks_like_gbnf(text: str) -> bool:
    """Whether a line begins with `name ::=`."""
    return _BEGIN.search(text) is not None


def parse_gbnf(text: str) -> dict[str, Node]:
    """The rules that `root` needs. Raises GrammarError with the line, or the rule, and what is wrong."""
    tokens = list(_tokens(text))
    starts = [i - 1 for i, token in enumerate(tokens) if token[0] == "define"]
    if not starts or starts[0] != 0:
        raise GrammarError("grammar", f"{_where(text, 0)}: a rule must begin with its name and ::=")
    dotted = {tokens[i][1] for i in starts if "." in tokens[i][1]}
    rules: dict[str, Node] = {}
    for begin, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        kind, name, place = tokens[begin]
        if kind != "name":
            raise GrammarError(
                "grammar", f"{_where(text, place)}: {name!r} before ::= is not the name of a rule"
            )
        if name in rules:
            raise GrammarError("grammar", f"{_where(text, place)}: rule {name} is defined twice")
        body = tokens[begin + 2 : end]
        if not body:
            raise GrammarError(
                "grammar", f'{_where(text, place)}: rule {name} is empty; write "" for the empty string'
            )
        rules[name] = _Body(text, name, list(_undotted(body, dotted))).parse()
    for node in (rules := check(rules, START, left_recursion=False)).values():
        check_repeats(node, "grammar")
    return rules


def _tokens(text: str) -> Iterator[Token]:
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            char = text[place]
            what = _UNENDED.get(char, f"unexpected {char!r}")
            raise GrammarError("grammar", f"{_where(text, place)}: {what}")
        kind = match.lastgroup or ""
        if kind in _REFUSED:
            raise GrammarError(
                "grammar", f"{_where(text, place)}: {_REFUSED[kind].format(match[0])} is not supported"
            )
        if kind != "space":
            yield kind, match[0], place
        place = match.end()


def _undotted(tokens: list[Token], dotted: set[str]) -> Iterator[Token]:
    """Dots in names that no rule has stand for any character."""
    for kind, text, place in tokens:
        if kind != "name" or "." not in text or text in dotted:
            yield kind, text, place
            continue
        for part in re.finditer(r"\.|[^.]+", text):
            yield ("mark" if part[0] == "." else "name"), part[0], place + part.start()


def _where(text: str, place: int) -> str:
    return f"line {text.count(chr(10), 0, place) + 1}"


class _Body:
    """What stands behind `::=`."""

    def __init__(self, text: str, rule: str, tokens: list[Token]) -> None:
        self._text, self._rule, self._tokens, self._at, self._depth = text, rule, tokens, 0, 0

    def parse(self) -> Node:
        node = self._either()
        if self._at < len(self._tokens):
            raise self._error(f"unexpected {self._tokens[self._at][1]!r}")
        return node

    def _error(self, message: str) -> GrammarError:
        place = self._tokens[min(self._at, len(self._tokens) - 1)][2]
        return GrammarError("grammar", f"{_where(self._text, place)}, rule {self._rule}: {message}")

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at][:2] if self._at < len(self._tokens) else ("end", "")

    def _either(self) -> Node:
        parts = [self._then()]
        while self._next() == ("mark", "|"):
            self._at += 1
            parts.append(self._then())
        return choice(parts)

    def _then(self) -> Node:
        parts: list[Node] = []
        while (token := self._next())[0] != "end" and token not in {("mark", "|"), ("mark", ")")}:
            parts.append(self._repeated(self._one(*token)))
        return series(parts)

    def _one(self, kind: str, text: str) -> Node:
        if kind == "mark" and text == "(":
            return self._group()
        if kind == "mark" and text != ".":
            raise self._error(f"nothing to repeat before {text!r}")
        if kind == "count":
            raise self._error(f"nothing to repeat before {text!r}")
        if kind == "define":
            raise self._error("::= without the name of a rule before it")
        self._at += 1
        if kind == "name":
            if self._next() == ("mark", "(") and text[:1].isupper() and self._touches():
                raise self._error(f"the macro {text}(...) is not supported")
            return RuleRef(text)
        if kind == "text":
            return Text("".join(self._chars(text[1:-1])))
        return ANY if kind == "mark" else self._one_of(text)

    def _touches(self) -> bool:
        _, text, place = self._tokens[self._at - 1]
        return place + len(text) == self._tokens[self._at][2]

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        opened = self._at
        self._at += 1
        node = self._either()
        if self._next() != ("mark", ")"):
            self._at = opened
            raise self._error("'(' is not closed")
        self._at += 1
        self._depth -= 1
        return node

    def _repeated(self, node: Node) -> Node:
        """A node with the repetitions that follow it."""
        while True:
            kind, text = self._next()
            if kind == "mark" and text in "*+?":
                low, high = REPEATS[text]
            elif kind == "count":
                low, high = self._counts(text)
            else:
                return node
            self._at += 1
            node = Times(node, low, high)

    def _counts(self, text: str) -> tuple[int, int | None]:
        match = _COUNT.fullmatch(text)
        if match is None:
            raise self._error(f"{text!r} is not a repetition such as {{2}}, {{2,}} or {{2,5}}")
        low = int(match[1])
        high = low if match[2] is None else None if match[3] is None else int(match[3])
        if high is not None and high < low:
            raise self._error(f"the repetition {text} has a maximum below its minimum")
        return low, high

    def _one_of(self, text: str) -> Node:
        inner = text[1:-1]
        negated = inner.startswith("^")
        chars = list(self._chars(inner[negated:], dashes=True))
        ranges, at = [], 0
        while at < len(chars):
            low = high = chars[at]
            if (
                at + 2 < len(chars) and chars[at + 1] == ""
            ):  # a dash that is not escaped, and not the last one
                high = chars[at + 2]
                at += 2
            at += 1
            first, last = ord(low or "-"), ord(high or "-")
            if last < first:
                raise self._error(f"the range {low}-{high} is out of order")
            ranges.append((first, last))
        if not ranges:
            raise self._error(f"{text} has no characters")
        node = OneOf(negate(ranges) if negated else merge(ranges))
        if not node.ranges:
            raise self._error(f"{text} matches no character")
        return node

    def _chars(self, text: str, dashes: bool = False) -> Iterator[str]:
        """Characters, with escapes resolved; with `dashes`, "" stands for a dash that is not escaped."""
        at = 0
        while at < len(text):
            char = text[at]
            at += 1
            if char != "\\":
                yield "" if dashes and char == "-" else char
                continue
            kind = text[at]
            digits = _HEX.get(kind, 0)
            code = text[at + 1 : at + 1 + digits]
            at += 1 + digits
            if not digits and kind not in _ESCAPES and kind not in _ITSELF:
                raise self._error(f"the escape \\{kind} is not supported")
            if not digits:
                yield _ESCAPES.get(kind, kind)
                continue
            if not re.fullmatch(rf"[0-9a-fA-F]{{{digits}}}", code):
                raise self._error(f"the escape \\{kind}{code} needs {digits} hexadecimal digits")
            point = int(code, 16)
            if point > LAST or 0xD800 <= point <= 0xDFFF:
                raise self._error(f"the escape \\{kind}{code} is not a character")
            yield chr(point)
