"""Structural tags: free text with tags whose contents have a form, as vLLM and xgrammar take them.

Two forms: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, and {"format": {"type": ..., ...}}, see
https://github.com/mlc-ai/xgrammar/blob/main/docs/structural_tag/structural_tag.md. Formats of text are read completely;
those of single tokens, and contents in XML, are refused by name, as are fields that are not known.

Free text ends where the first of some texts ends: that is a regular language, so the grammar has no priorities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.records import dataclass
from quire.structured.ask import GrammarError
from quire.structured.character_rules import (
    ALL_BITS,
    MAX_DEPTH,
    MAX_REPEATS,
    Alternatives,
    Node,
    Opaque,
    RuleRef,
    Text,
    Then,
    Times,
    check_repeats,
    choice,
    series,
    texts,
)
from quire.structured.gbnf import START, looks_like_gbnf, parse_gbnf
from quire.structured.lark import AddSchema
from quire.structured.lark_text import quoted
from quire.structured.regex import parse_regex

FIELD = "structural_tag"
TOP = "root"
_ANY = "/(?s:.*)/"
# What a JSON value may begin with, and what may continue one that could end: the digits of a number.
_VALUE_BEGINS = sum(1 << ord(char) for char in '{["-0123456789tfn \t\r\n')
_VALUE_GOES_ON = sum(1 << ord(char) for char in "0123456789.eE+- \t\r\n")
_TOKENS = {"token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch"}
_TIMES: dict[str, tuple[int, int | None]] = {"optional": (0, 1), "plus": (1, None), "star": (0, None)}
_FREE = {"any_text", "triggered_tags", "dispatch"}
_MISSING: Any = object()
_KINDS: dict[type[Any], str] = {
    str: "a string", int: "an integer", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip


def parse_structural_tag(value: object, add_schema: AddSchema) -> dict[str, Node]:
    """The rules of the text, from `TOP`. Raises GrammarError naming the place and what is not supported."""
    top = _Format(value, FIELD)
    top.take("type", str, "structural_tag")
    tags = _Tags(add_schema)
    if isinstance(value, dict) and "structures" in value:
        tags.rules[TOP] = tags.older(top)
    else:
        tags.rules[TOP] = tags.make(top.child("format"), (), 0)
    top.finish()
    for node in tags.rules.values():
        check_repeats(node, FIELD)
    return tags.rules


class _Format:
    """An object whose fields are taken one by one; none may be left."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise GrammarError(where, f"must be an object, not {type(value).__name__}")
        self.where, self._left = where, dict(value)

    def take(self, name: str, kind: type[Any] | tuple[type[Any], ...], default: Any = _MISSING) -> Any:
        """A field of this type, or the default if there is one."""
        value = self._left.pop(name, default)
        if value is _MISSING:
            raise GrammarError(self.where, f"the field {name} is missing")
        right = isinstance(value, kind) and (kind is not int or not isinstance(value, bool))
        if not right and value is not default:
            kinds = " or ".join(_KINDS[one] for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise GrammarError(f"{self.where}.{name}", f"must be {kinds}, not {value!r:.80}")
        return value

    def texts(self, name: str, default: Any = _MISSING) -> list[str]:
        """A list of texts that are not empty."""
        values = self.take(name, list, default)
        for i, value in enumerate(values):
            if not isinstance(value, str) or not value:
                raise GrammarError(f"{self.where}.{name}[{i}]", "must be a string that is not empty")
        return values  # type: ignore[no-any-return]

    def child(self, name: str) -> _Format:
        """A field that is an object."""
        return _Format(self.take(name, dict), f"{self.where}.{name}")

    def children(self, name: str) -> list[_Format]:
        """A field that is a list of objects, with at least one."""
        values = self.take(name, list)
        if not values:
            raise GrammarError(f"{self.where}.{name}", "must not be empty")
        return [_Format(value, f"{self.where}.{name}[{i}]") for i, value in enumerate(values)]

    @property
    def kind(self) -> object:
        """The type, without taking it."""
        return self._left.get("type")

    def fixed(self) -> str:
        """The text of a format that is a fixed one."""
        value = self._left.get("value")
        return (
            value if self.kind == "const_string" and len(self._left) == 2 and isinstance(value, str) else ""
        )

    def only(self, name: str, allowed: object) -> None:
        """A field for which there is one value."""
        if (value := self._left.pop(name, allowed)) != allowed:
            raise GrammarError(f"{self.where}.{name}", f"{value!r:.80} is not supported")

    def finish(self) -> None:
        """Refuse what was not taken."""
        for name in self._left:
            raise GrammarError(f"{self.where}.{name}", "the field is not supported")


@dataclass(frozen=True, slots=True)
class _Tag:
    """A tag with a fixed beginning; `rest` follows `begin`."""

    begin: str
    rest: Node
    where: str


class _Tags:
    """Makes rules of formats. `ends`: texts one of which comes behind a format, and belongs to what is made of it."""

    def __init__(self, add_schema: AddSchema) -> None:
        self.rules: dict[str, Node] = {}
        self._add_schema = add_schema
        self._groups = self._count = 0

    def make(self, form: _Format, ends: Sequence[str], depth: int) -> Node:
        """The rule of a format and its end."""
        if depth > MAX_DEPTH:
            raise GrammarError(form.where, f"formats are nested more than {MAX_DEPTH} deep")
        kind = form.take("type", str)
        if kind in _TOKENS:
            raise GrammarError(
                form.where, f"the format {kind} is not supported: a grammar describes text, not tokens"
            )
        if kind in _FREE:
            free = {
                "any_text": self._any_text,
                "triggered_tags": self._triggered_tags,
                "dispatch": self._dispatch,
            }[kind]
            node = free(form, ends, depth)
        elif kind == "sequence":
            node = self._sequence(form.children("elements"), ends, depth)
        else:
            node = series((self._closed(kind, form, depth), texts(ends)))
        form.finish()
        return node

    def older(self, form: _Format) -> Node:
        """structures and triggers."""
        tags = []
        for item in form.children("structures"):
            begin, end = item.take("begin", str), item.take("end", str)
            schema = item.take("schema", (dict, bool, str))
            tags.append(_Tag(begin, series((self._value(schema), Text(end))), item.where))
            item.finish()
        return self._triggered(form, form.texts("triggers"), tags, (), [])

    def _closed(self, kind: str, form: _Format, depth: int) -> Node:
        """The formats that know where they end."""
        if kind in _TIMES or kind == "repeat":
            low, high = _TIMES.get(kind) or self._limits(form)
            return Times(self.make(form.child("content"), (), depth + 1), low, high)
        make: Callable[[], Node] | None = {
            "const_string": lambda: Text(form.take("value", str)),
            "json_schema": lambda: self._json_schema(form),
            "regex": lambda: parse_regex(form.take("pattern", str), f"{form.where}.pattern"),
            "grammar": lambda: self._grammar(form),
            "tag": lambda: self._tag(form, depth),
            "or": lambda: choice(self.make(part, (), depth + 1) for part in form.children("elements")),
            "tags_with_separator": lambda: self._separated(form, depth),
        }.get(kind)
        if make is None:
            raise GrammarError(form.where, f"the format {kind[:80]!r} is not supported")
        return make()

    def _limits(self, form: _Format) -> tuple[int, int | None]:
        low, high = form.take("min", int), form.take("max", int)
        if not (0 <= low <= MAX_REPEATS and (high == -1 or low <= high <= MAX_REPEATS)):
            raise GrammarError(
                form.where,
                f"min {low} and max {high} do not keep to 0 <= min <= max <= {MAX_REPEATS} (max -1: no limit)",
            )
        return low, None if high == -1 else high

    def _json_schema(self, form: _Format) -> Node:
        form.only("style", "json")
        form.only("any_order", False)
        form.only("max_whitespace_cnt", None)
        return self._value(form.take("json_schema", (dict, bool)))

    def _value(self, schema: object) -> Node:
        return Opaque(f"@{self._add_schema(schema)}", False, _VALUE_BEGINS, _VALUE_GOES_ON)

    def _grammar(self, form: _Format) -> Node:
        text = form.take("grammar", str)
        if not looks_like_gbnf(text):
            raise GrammarError(f"{form.where}.grammar", "not EBNF: no line begins with name ::=")
        self._count += 1
        prefix = f"g{self._count}-"
        self.rules |= {prefix + name: _renamed(node, prefix) for name, node in parse_gbnf(text).items()}
        return RuleRef(prefix + START)

    def _tag(self, form: _Format, depth: int) -> Node:
        tag = self._read_tag(form, depth)
        return series((Text(tag.begin), tag.rest))

    def _read_tag(self, form: _Format, depth: int) -> _Tag:
        """A tag; the ends belong to its content, which may be free text up to one of them."""
        begin = form.take("begin", str)
        ends = form.take("end", (str, list))
        ends = [ends] if isinstance(ends, str) else ends
        if not ends or not all(isinstance(end, str) for end in ends):
            raise GrammarError(f"{form.where}.end", "must be a string or a list of strings")
        return _Tag(
            begin, self.make(form.child("content"), [end for end in ends if end], depth + 1), form.where
        )

    def _read_tags(self, form: _Format, depth: int) -> list[_Tag]:
        tags = []
        for item in form.children("tags"):
            if item.take("type", str, "tag") != "tag":
                raise GrammarError(f"{item.where}.type", 'must be "tag"')
            tags.append(self._read_tag(item, depth))
            item.finish()
        return tags

    def _sequence(self, parts: list[_Format], ends: Sequence[str], depth: int) -> Node:
        """One after the other. Free text ends where a fixed text behind it begins."""
        out: list[Node] = []
        at = 0
        while at < len(parts):
            part, at = parts[at], at + 1
            fixed = parts[at].fixed() if at < len(parts) and part.kind in _FREE else ""
            if fixed:
                at += 1
                out.append(self.make(part, (fixed,), depth + 1))
                continue
            last = at == len(parts)
            out.append(self.make(part, ends if last else (), depth + 1))
            if last:
                break
        else:
            out.append(texts(ends))
        return series(out)

    def _separated(self, form: _Format, depth: int) -> Node:
        tags = choice(series((Text(tag.begin), tag.rest)) for tag in self._read_tags(form, depth))
        separator = Text(form.take("separator", str))
        at_least_one, once = (
            form.take("at_least_one", bool, False),
            form.take("stop_after_first", bool, False),
        )
        node = tags if once else Then((tags, Times(series((separator, tags)), 0, None)))
        return node if at_least_one else Times(node, 0, 1)

    def _any_text(self, form: _Format, ends: Sequence[str], _depth: int) -> Node:
        form.only("max_tokens", None)
        form.only("max_chars", None)
        excludes = form.texts("excludes", [])
        rest, stops = self._free(list(ends), excludes, form.where)
        return choice(stops) if ends else rest

    def _triggered_tags(self, form: _Format, ends: Sequence[str], depth: int) -> Node:
        tags = self._read_tags(form, depth)
        return self._triggered(form, form.texts("triggers"), tags, ends, form.texts("excludes", []))

    def _triggered(
        self, form: _Format, triggers: list[str], tags: list[_Tag], ends: Sequence[str], excludes: list[str]
    ) -> Node:
        rests: dict[str, list[Node]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            fitting = [trigger for trigger in rests if tag.begin.startswith(trigger)]
            if len(fitting) != 1:
                raise GrammarError(
                    f"{tag.where}.begin", f"must begin with exactly one of the triggers, not {len(fitting)}"
                )
            rests[fitting[0]].append(series((Text(tag.begin[len(fitting[0]) :]), tag.rest)))
        for trigger, found in rests.items():
            if not found:
                raise GrammarError(f"{form.where}.triggers", f"no tag begins with {trigger!r:.80}")
        at_least_one, once = (
            form.take("at_least_one", bool, False),
            form.take("stop_after_first", bool, False),
        )
        first = choice(series((Text(trigger), choice(found))) for trigger, found in rests.items())
        rules = [(trigger, choice(found)) for trigger, found in rests.items()]
        if at_least_one and once:
            return series((first, texts(ends)))
        rest = self._dispatched(rules, ends, excludes, form.where, loop=not once)
        return series((first, rest)) if at_least_one else rest

    def _dispatch(self, form: _Format, ends: Sequence[str], depth: int) -> Node:
        rules = []
        for i, pair in enumerate(form.take("rules", list)):
            where = f"{form.where}.rules[{i}]"
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
                raise GrammarError(where, "must be a list of a string and a format")
            rules.append((pair[0], self.make(_Format(pair[1], f"{where}[1]"), (), depth + 1)))
        loop = form.take("loop", bool, True)
        return self._dispatched(rules, ends, form.texts("excludes", []), form.where, loop=loop)

    def _dispatched(
        self,
        rules: list[tuple[str, Node]],
        ends: Sequence[str],
        excludes: list[str],
        where: str,
        *,
        loop: bool,
    ) -> Node:
        """Free text in which some texts are followed by what belongs to them."""
        rest, stops = self._free([text for text, _ in rules] + list(ends), excludes, where)
        calls = choice(series((stop, node)) for stop, (_, node) in zip(stops, rules, strict=False))
        close = choice(stops[len(rules) :]) if ends else rest
        if loop:
            return series((Times(calls, 0, None), close))
        return choice((series((calls, texts(ends))), close))

    def _free(self, stops: list[str], excludes: list[str], where: str) -> tuple[Node, list[Node]]:
        """Text without any of these texts, and for each of `stops`, text that ends with its first occurrence."""
        for stop in stops:
            for other in [*stops, *excludes]:
                if (other is not stop or stops.count(stop) > 1) and other in stop:
                    raise GrammarError(
                        where, f"{stop!r:.80} contains {other!r:.80}, so free text always ends before it"
                    )
        self._groups += 1
        words = " | ".join(map(quoted, [*stops, *excludes]))
        rest = f"{_ANY} & ~({_ANY} ({words}) {_ANY})" if words else _ANY
        first = f"~({_ANY} ({words}) /(?s:.+)/)"
        made: list[Node] = [
            Opaque(f"({_ANY} {quoted(stop)}) & {first}", True, ALL_BITS, 0, group=self._groups)
            for stop in stops
        ]
        return Opaque(rest, True, ALL_BITS, ALL_BITS, True, self._groups), made


def _renamed(node: Node, prefix: str) -> Node:
    if isinstance(node, RuleRef):
        return RuleRef(prefix + node.name)
    if isinstance(node, Times):
        return Times(_renamed(node.part, prefix), node.low, node.high)
    if isinstance(node, Then | Alternatives):
        return type(node)(tuple(_renamed(part, prefix) for part in node.parts))
    return node
