"""Checks a grammar in Lark as llguidance reads it, and hands its JSON schemas to our own compiler.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. Refused by name, besides what llguidance refuses:
tokens and other grammars, since a grammar describes text; options and attributes that change how tokens are chosen or
taken back; rules that never end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from quire.structured.ask import GrammarError
from quire.structured.character_rules import (
    MAX_DEPTH,
    NOTHING,
    REPEATS,
    Node,
    RuleRef,
    Text,
    Then,
    Times,
    check,
    check_repeats,
    choice,
    names,
    series,
)

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r]|(?:\#|//)[^\n]*)+)
    |(?P<line>\n[\s]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\]|\\.)+/[imslux]*)
    |(?P<statement>%[a-z]+)
    |(?P<token><[^<>\s]+>)
    |(?P<grammar>@[\w-]+)
    |(?P<rule>!?[_?]?[a-z][_a-z0-9-]*)
    |(?P<terminal>_?[A-Z][_A-Z0-9-]*)
    |(?P<number>[+-]?\d+(?:\.(?!\.)\d*)?)
    |(?P<mark>->|\.\.|::|[:|()\[\]{},=.~&+*?])""",
    re.X | re.S | re.A,
)
_REFUSED = {
    "token": "the token {}",
    "grammar": "the reference {}",
}
_STATEMENTS = {"%import", "%ignore", "%json", "%regex", "%llguidance"}
_OPTIONS = {"allow_initial_skip", "ignore_once"}
_ATTRIBUTES = {"lazy", "suffix", "capture"}
_ENDS = {"|", ")", "]", "->", "end", "line"}

Token = tuple[str, str, int]  # kind, text, place
# Compiles a schema and returns the name of its grammar.
AddSchema = Callable[[object], str]


def check_lark(text: str, add_schema: AddSchema) -> str:
    """The grammar with references in place of its schemas. Raises GrammarError with the line or the rule, and what is
    wrong; what only llguidance knows, such as the syntax of regular expressions, is checked when it validates.
    """
    pieces: list[str] = []
    tokens = list(_tokens(text, add_schema, pieces))
    rules: dict[str, Node] = {}
    for line in _lines(tokens):
        if line[0][0] == "statement":
            continue
        if line[0][0] not in {"rule", "terminal"}:
            raise _error(text, line[0][2], f"a rule must begin with its name, not with {line[0][1]!r}")
        name = line[0][1].lstrip("!?")
        if name in rules:
            raise _error(text, line[0][2], f"rule {name} is defined twice")
        rules[name] = _Rule(text, name, line).parse()
    imported = {
        token[1]
        for line in _lines(tokens)
        if line[0][1] == "%import"
        for token in line
        if token[0] == "terminal"
    }
    rules |= {name: NOTHING for name in imported if name not in rules}
    for node in check(rules, "start", left_recursion=True).values():
        check_repeats(node, "grammar")
    return "".join(pieces)


def _error(text: str, place: int, message: str) -> GrammarError:
    return GrammarError("grammar", f"line {text.count(chr(10), 0, place) + 1}: {message}")


def _tokens(text: str, add_schema: AddSchema, pieces: list[str]) -> Iterator[Token]:
    """The tokens of a grammar; `pieces` gets its text, with references in place of schemas."""
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise _error(text, place, f"unexpected {text[place]!r}")
        kind, found, begin, place = match.lastgroup or "", match[0], place, match.end()
        if kind in _REFUSED:
            raise _error(text, begin, f"{_REFUSED[kind].format(found)} is not supported")
        if kind == "statement" and found not in _STATEMENTS:
            raise _error(text, begin, f"{found} is not supported")
        if found in {"%json", "%regex", "%llguidance"}:
            value, place = _json(text, place, found)
            if found == "%llguidance":
                _check_options(text, begin, value)
            kind = "statement" if found == "%llguidance" else "text"
            pieces.append(f"@{add_schema(value)} " if found == "%json" else text[begin:place])
        else:
            pieces.append(found)
        if kind != "space":
            yield kind, found, begin


def _json(text: str, place: int, what: str) -> tuple[object, int]:
    place += len(text[place:]) - len(text[place:].lstrip())
    try:
        return json.JSONDecoder(object_pairs_hook=no_duplicates).raw_decode(text, place)
    except ValueError as error:
        raise _error(text, place, f"what follows {what} is not JSON: {error}") from None


def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON. Raises ValueError for a key that it has twice."""
    out: dict[str, object] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"duplicate key {key[:100]!r}")
        out[key] = value
    return out


def _check_options(text: str, place: int, value: object) -> None:
    for name in value if isinstance(value, dict) else ():
        if name not in _OPTIONS:
            raise _error(text, place, f"the option {name} of %llguidance is not supported")


def _lines(tokens: list[Token]) -> Iterator[list[Token]]:
    """Statements and definitions; a line that begins with | continues the one before."""
    line: list[Token] = []
    depth = 0
    for i, token in enumerate(tokens):
        if token[0] == "line":
            following = tokens[i + 1][1] if i + 1 < len(tokens) else ""
            if depth == 0 and following != "|" and line:
                yield line
                line = []
            continue
        if token[0] == "mark":
            depth += (token[1] in "([") - (token[1] in ")]")
        line.append(token)
    if line:
        yield line


class _Rule:
    """A definition, read as far as it says what a rule refers to and when it ends."""

    def __init__(self, text: str, name: str, tokens: list[Token]) -> None:
        self._text, self._name, self._tokens, self._at, self._depth = text, name, tokens, 1, 0

    def parse(self) -> Node:
        if self._next() == "[":
            self._attributes()
        if self._next() in {"{", ".", "::"}:
            kinds = {"{": "a template", ".": "a priority", "::": "a parametric rule"}
            raise self._error(f"{kinds[self._next()]} is not supported")
        self._expect(":")
        node = self._either()
        if self._next() != "end":
            raise self._error(f"unexpected {self._next()!r}")
        if self._tokens[0][0] == "terminal":  # llguidance compiles it as a whole
            return Then(tuple(map(RuleRef, names(node))))
        return node

    def _next(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else "end"

    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else "end"

    def _error(self, message: str) -> GrammarError:
        place = self._tokens[min(self._at, len(self._tokens) - 1)][2]
        return _error(self._text, place, f"rule {self._name}: {message}")

    def _expect(self, mark: str) -> None:
        if self._next() != mark:
            raise self._error(f"expected {mark!r} before {self._next()!r}")
        self._at += 1

    def _attributes(self) -> None:
        while self._next() not in {"]", "end"}:
            self._at += 1
            if self._kind() == "rule" and self._next() not in _ATTRIBUTES:
                raise self._error(f"the attribute {self._next()} is not supported")
        self._expect("]")

    def _either(self) -> Node:
        parts = [self._then()]
        while self._next() == "|":
            self._at += 1
            parts.append(self._then())
        return choice(parts)

    def _then(self) -> Node:
        parts: list[Node] = []
        while self._next() not in _ENDS or self._kind() not in {"mark", "end"}:
            if self._next() == "&":
                self._at += 1
            else:
                parts.append(self._repeated(self._one()))
        if self._next() == "->":
            self._at += 2
        return series(parts)

    def _one(self) -> Node:
        kind, found = self._kind(), self._next()
        self._at += 1
        if kind in {"rule", "terminal"}:
            if self._next() in {"::", "{"} and (
                self._next() == "::" or self._tokens[self._at + 1 :][:1][0][0] != "number"
            ):
                raise self._error("templates and parametric rules are not supported")
            return RuleRef(found.lstrip("!?"))
        if kind in {"text", "regex"}:
            if self._next() == "..":
                self._at += 2
            return Text("" if found == '""' else "x")
        if found == "~":
            return self._one()
        if found not in {"(", "["}:
            self._at -= 1
            raise self._error(f"unexpected {found!r}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        node = self._either()
        self._depth -= 1
        self._expect(")" if found == "(" else "]")
        return node if found == "(" else Times(node, 0, 1)

    def _repeated(self, node: Node) -> Node:
        found = self._next() if self._kind() == "mark" else ""
        if found and found in "*+?":
            self._at += 1
            return Times(node, *REPEATS[found])
        if found == "{" or (
            found == "~" and self._tokens[self._at + 1 :][:1] and self._tokens[self._at + 1][0] == "number"
        ):
            return Times(node, *self._counts(found))
        return node

    def _counts(self, found: str) -> tuple[int, int | None]:
        """The limits of {m,n}, {m,}, {,n}, {m}, ~m or ~m..n."""
        self._at += 1
        low = self._number()
        if self._next() in {",", ".."}:
            self._at += 1
            high = self._number()
        else:
            high = low
        if found == "{":
            self._expect("}")
        return low or 0, high

    def _number(self) -> int | None:
        if self._kind() != "number":
            return None
        digits = self._next()
        self._at += 1
        if not digits.isdigit() or len(digits) > 10:
            raise self._error(f"{digits[:20]} is not a valid number of repetitions")
        return int(digits)
