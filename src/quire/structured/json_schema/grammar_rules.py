"""Rules of a context-free grammar: made in any order, pruned of what never ends, written in llguidance's Lark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from quire.structured.json_schema.languages import repeated
from quire.structured.json_schema.refusal import MAX_RULES, SchemaError


class Expr(NamedTuple):
    """Part of a rule: `text` (a terminal), `rule` (a name), `seq`, `alt`, or `rep` of one part."""

    kind: str
    parts: tuple[Expr, ...] = ()
    text: str = ""
    low: int = 0
    high: int | None = None


NEVER = Expr("alt")
EMPTY = Expr("seq")


def header(space: str) -> str:
    """The lines of a grammar that allow white space."""
    return f'%llguidance {{"ignore_once": true}}\n%ignore /{space}/'


def text(expression: str) -> Expr:
    return Expr("text", text=expression)


def seq(*parts: Expr) -> Expr:
    if NEVER in parts:
        return NEVER
    flat = [one for part in parts for one in (part.parts if part.kind == "seq" else (part,))]
    return flat[0] if len(flat) == 1 else Expr("seq", tuple(flat))


def alt(*parts: Expr) -> Expr:
    flat = dict.fromkeys(one for part in parts for one in (part.parts if part.kind == "alt" else (part,)))
    return next(iter(flat)) if len(flat) == 1 else Expr("alt", tuple(flat))


def rep(part: Expr, low: int, high: int | None) -> Expr:
    if high is not None and high < max(low, 0):
        return NEVER
    if part == NEVER or high == 0:
        return EMPTY if low <= 0 else NEVER
    return part if (low, high) == (1, 1) else Expr("rep", (part,), "", max(low, 0), high)


class GrammarRules:
    """Rules by name, and terminals by what they match."""

    def __init__(self) -> None:
        self._rules: dict[str, Expr] = {}
        self._raw: dict[str, str] = {}
        self._terminals: dict[str, str] = {}

    def reserve(self) -> Expr:
        """A rule that is defined later."""
        name = f"r{len(self._rules)}"
        if len(self._rules) >= MAX_RULES:
            raise SchemaError("", "", f"the grammar of the schema has more than {MAX_RULES} rules")
        self._rules[name] = NEVER
        return Expr("rule", text=name)

    def define(self, rule: Expr, body: Expr) -> None:
        self._rules[rule.text] = body

    def rule(self, body: Expr) -> Expr:
        """A rule of its own, for a body that stands in several places."""
        if body.kind in {"text", "rule"} or not body.parts:
            return body
        rule = self.reserve()
        self.define(rule, body)
        return rule

    def raw(self, lines: Iterable[str]) -> None:
        """Parametric rules as they are written, of terminals alone."""
        for line in lines:
            self._raw[line.partition(":")[0]] = line

    def terminal(self, expression: str) -> Expr:
        name = self._terminals.setdefault(expression, f"T{len(self._terminals)}")
        return text(name)

    def name(self, prefix: str) -> str:
        return f"{prefix}{len(self._raw)}"

    def written(self, start: Expr, header: str) -> str | None:
        """The grammar of what `start` stands for; None if that never ends."""
        ends = self._endings()
        body = _pruned(start, ends)
        if body == NEVER:
            return None
        lines, todo, done = [f"start: {_lark(body, 0)}"], [body], set[str]()
        while todo:
            part = todo.pop()
            todo += part.parts
            if part.kind == "rule" and part.text not in done:
                done.add(part.text)
                body = _pruned(self._rules[part.text], ends)
                lines.append(f"{part.text}: {_lark(body, 0)}")
                todo.append(body)
        lines += self._raw.values()
        whole = "\n".join(lines)
        names = set(whole.replace("(", " ").replace(")", " ").replace("{", " ").split())
        names |= {word.rstrip("?*+") for word in names}
        used = [f"{name}: {expression}" for expression, name in self._terminals.items() if name in names]
        return "\n".join([header, *lines, *used]) + "\n"

    def _endings(self) -> set[str]:
        """Rules that some finite text satisfies: the least such set, by following their references."""
        users: dict[str, list[str]] = {}
        for name, body in self._rules.items():
            for used in _rules_in(body):
                users.setdefault(used, []).append(name)
        ends: set[str] = set()
        todo = list(self._rules)
        while todo:
            name = todo.pop()
            if name not in ends and _pruned(self._rules[name], ends) != NEVER:
                ends.add(name)
                todo += users.get(name, [])
        return ends


def _rules_in(body: Expr) -> set[str]:
    found, todo = set(), [body]
    while todo:
        part = todo.pop()
        if part.kind == "rule":
            found.add(part.text)
        todo += part.parts
    return found


def _pruned(body: Expr, ends: set[str]) -> Expr:
    """Without what never ends."""
    if body.kind == "text":
        return body
    if body.kind == "rule":
        return body if body.text in ends else NEVER
    parts = [_pruned(part, ends) for part in body.parts]
    if body.kind == "seq":
        return seq(*parts)
    if body.kind == "alt":
        return alt(*(part for part in parts if part != NEVER))
    return rep(parts[0], body.low, body.high)


def _lark(body: Expr, level: int) -> str:
    """`level` 0: alternatives may stand here; 1: a sequence may; 2: one item."""
    if body.kind in {"text", "rule"}:
        return body.text
    if not body.parts:
        return '""'
    if body.kind == "rep":
        return f"({_lark(body.parts[0], 0)}){repeated(body.low, body.high)}"
    level_of = {"alt": 0, "seq": 1}[body.kind]
    joined = (" | " if level_of == 0 else " ").join(_lark(part, level_of + 1) for part in body.parts)
    return f"({joined})" if level > level_of else joined
