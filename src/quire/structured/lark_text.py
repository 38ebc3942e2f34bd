"""Writes a grammar that has been cut into terminals in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.structured.character_rules import (
    Alternatives,
    Node,
    OneOf,
    Opaque,
    Range,
    RuleRef,
    Rules,
    Terminal,
    Text,
    Then,
    Times,
)
from quire.structured.terminals import cut

_MAX_GROUPS = 8  # in each other; llguidance has a limit of 30


def write_lark(rules: Rules, start: str) -> str:
    """A grammar of the texts that `start` describes. Raises GrammarError if they cannot be told apart by a lexer."""
    made = cut(rules, start)
    tokens, parser = _Lines("T"), _Lines("r")
    named = {rule: tokens.name(rule) for rule in made.regular}
    terminals: dict[int, str] = {}

    def token_leaf(node: Node) -> str:
        if isinstance(node, RuleRef):
            name = named[node.name]
            tokens.define(name, made.regular[node.name], token_leaf)
            return name
        return _leaf(node)

    def terminal(node: Node) -> str:
        if isinstance(node, RuleRef | Text | OneOf):
            return token_leaf(node)
        if isinstance(node, Opaque) and not node.terminal:
            return node.lark
        name = tokens.name("")
        if isinstance(node, Opaque):
            tokens.lines[name] = node.lark
        else:
            tokens.define(name, node, token_leaf)
        return name

    def rule_leaf(tree: Node) -> str:
        if isinstance(tree, Terminal):
            if tree.index not in terminals:
                terminals[tree.index] = terminal(made.terminals[tree.index])
            return terminals[tree.index]
        return rule_names[tree.name] if isinstance(tree, RuleRef) else _leaf(tree)

    rule_names = {rule: "start" if rule == start else parser.name(rule) for rule in made.rules}
    for rule, tree in made.rules.items():
        parser.define(rule_names[rule], tree, rule_leaf)
    return "".join(f"{name}: {body}\n" for name, body in [*parser.lines.items(), *tokens.lines.items()])


class _Lines:
    """The definitions of one kind; groups that are too deep get one of their own."""

    def __init__(self, prefix: str) -> None:
        self.lines: dict[str, str] = {}
        self._prefix, self._count = prefix, 0

    def name(self, shown: str) -> str:
        """A new name that shows another one."""
        self._count += 1
        shown = re.sub(r"[^a-z0-9]+", "_", shown.lower()).strip("_")[:40]
        name = f"{self._prefix}{self._count}{'_' if shown else ''}{shown}"
        return name.upper() if self._prefix.isupper() else name

    def define(self, name: str, tree: Node, leaf: Callable[[Node], str]) -> None:
        """Define a name once."""
        if name not in self.lines:
            self.lines[name] = ""
            self.lines[name] = self._write(tree, leaf, 0)

    def _write(self, tree: Node, leaf: Callable[[Node], str], depth: int) -> str:
        if isinstance(tree, Alternatives):
            return " | ".join(self._write(part, leaf, depth) for part in tree.parts)
        if isinstance(tree, Then):
            return " ".join(self._atom(part, leaf, depth, Alternatives) for part in tree.parts) or '""'
        if isinstance(tree, Times):
            if tree.high == 0:
                return '""'
            return self._atom(tree.part, leaf, depth, Alternatives | Then | Times) + _times(
                tree.low, tree.high
            )
        return leaf(tree)

    def _atom(self, tree: Node, leaf: Callable[[Node], str], depth: int, grouped: object) -> str:
        if not isinstance(tree, grouped):  # type: ignore[arg-type]
            return self._write(tree, leaf, depth)
        if depth < _MAX_GROUPS:
            return f"({self._write(tree, leaf, depth + 1)})"
        name = self.name("")
        self.define(name, tree, leaf)
        return name


def _times(low: int, high: int | None) -> str:
    marks = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return marks.get((low, high)) or f"{{{low},{'' if high is None else high}}}"


def _leaf(tree: Node) -> str:
    if isinstance(tree, Text):
        return quoted(tree.text)
    assert isinstance(tree, OneOf)
    inside = "".join(map(_range, tree.ranges)) + "".join(tree.classes)
    return f"/[{'^' if tree.negated else ''}{inside}]/"


def quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _range(ends: Range) -> str:
    low, high = map(_char, ends)
    return low if low == high else f"{low}-{high}"


def _char(point: int) -> str:
    return chr(point) if point < 128 and chr(point).isalnum() else f"\\x{{{point:X}}}"
