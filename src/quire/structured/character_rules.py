"""Rules of a grammar over characters, whatever language they were written in, and what makes them unusable.

A grammar is a mapping from names to nodes. `terminals` cuts it into what llguidance's lexer and parser do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from operator import or_
from typing import TypeAlias

from quire.records import dataclass
from quire.structured.ask import GrammarError

LAST = 0x10FFFF
Range = tuple[int, int]  # of code points, both ends included
MAX_RULES = 2**13
MAX_DEPTH = 128  # of groups in each other, and of rules that refer to each other
_MAX_JOINED = 256  # characters of a text that stands for a repeated one
MAX_REPEATS = 2**16  # of one thing, by all repetitions around it


@dataclass(frozen=True, slots=True)
class Text:
    """A fixed text."""

    text: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """One character of these ranges, or of these classes of the Unicode standard; with `negated`, one of no other."""

    ranges: tuple[Range, ...]
    classes: tuple[str, ...] = ()  # as \p{L} is written
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Then:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of these."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """`low` to `high` of a thing; `high` None has no limit."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class RuleRef:
    """What another rule describes."""

    name: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """A part given in Lark: a terminal, or a whole grammar (`@name`).

    `first`: bits of the characters that it may begin with; `more`: those that may continue a text which it accepts.
    Terminals of one `group` are made so that no text of one continues a text of another.
    """

    lark: str
    terminal: bool
    first: int
    more: int
    nullable: bool = False
    group: int = 0


@dataclass(frozen=True, slots=True)
class Terminal:
    """A terminal, by its number, in a rule that has been cut."""

    index: int


Node: TypeAlias = Text | OneOf | Then | Alternatives | Times | RuleRef | Opaque | Terminal
Rules = Mapping[str, Node]
NOTHING = Text("")
ANY = OneOf(((0, LAST),))
REPEATS: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def choice(parts: Iterable[Node]) -> Node:
    """One of these."""
    found = tuple(parts)
    return found[0] if len(found) == 1 else Alternatives(found) if found else NOTHING


def series(parts: Iterable[Node]) -> Node:
    """One after the other."""
    found = tuple(part for part in parts if part != NOTHING)
    return found[0] if len(found) == 1 else Then(found) if found else NOTHING


def texts(found: Iterable[str]) -> Node:
    """One of these texts."""
    return choice(map(Text, dict.fromkeys(found)))


def negate(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The characters of no range; surrogates are not characters."""
    out, begin = [], 0
    for low, high in sorted((*ranges, (0xD800, 0xDFFF))):
        if low > begin:
            out.append((begin, low - 1))
        begin = max(begin, high + 1)
    if begin <= LAST:
        out.append((begin, LAST))
    return tuple(out)


def merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same characters as sorted ranges that do not meet."""
    out: list[Range] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return tuple(out)


def bits(node: OneOf) -> int:
    """The characters as bits: one for each of ASCII, one for each 256 of the others; maybe too many, never too few."""
    if node.classes:
        return ALL_BITS
    ranges = negate(node.ranges) if node.negated else node.ranges
    return reduce(or_, (_run(_bit(low), _bit(high)) for low, high in ranges), 0)


def _bit(point: int) -> int:
    return point if point < 128 else 128 + (point >> 8)


def _run(low: int, high: int) -> int:
    return (1 << (high + 1)) - (1 << low)


ALL_BITS = _run(0, _bit(LAST))


def children(node: Node) -> tuple[Node, ...]:
    """The parts of a node."""
    if isinstance(node, Then | Alternatives):
        return node.parts
    return (node.part,) if isinstance(node, Times) else ()


def walk(node: Node) -> Iterator[Node]:
    """A node and all that it consists of."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(children(node)))


def names(node: Node) -> Iterator[str]:
    """The rules that a node refers to."""
    return (part.name for part in walk(node) if isinstance(part, RuleRef))


def simplified(node: Node, known: Rules) -> Node:
    """The same with texts joined and each alternative once; `known` are rules that have been simplified.

    llguidance 1.9 fails on `"a" "bc" | "abc"`: the same text, joined and not.
    """
    if isinstance(node, RuleRef):
        found = known.get(node.name)
        return found if isinstance(found, Text) else node
    if isinstance(node, Times):
        return _repeated(simplified(node.part, known), node.low, node.high)
    if isinstance(node, Then):
        return _joined(simplified(part, known) for part in node.parts)
    if isinstance(node, Alternatives):
        parts = (simplified(part, known) for part in node.parts)
        flat = (one for part in parts for one in (part.parts if isinstance(part, Alternatives) else (part,)))
        return choice(dict.fromkeys(flat))
    return node


def _repeated(part: Node, low: int, high: int | None) -> Node:
    if high == 0 or part == NOTHING:
        return NOTHING
    if isinstance(part, Text) and low == high and low * len(part.text) <= _MAX_JOINED:
        return Text(part.text * low)
    return part if (low, high) == (1, 1) else Times(part, low, high)


def _joined(parts: Iterable[Node]) -> Node:
    out: list[Node] = []
    for part in parts:
        for one in part.parts if isinstance(part, Then) else (part,):
            last = out[-1] if out else None
            if isinstance(one, Text) and isinstance(last, Text):
                out[-1] = Text(last.text + one.text)
            else:
                out.append(one)
    return series(out)


def check(rules: Rules, start: str, *, left_recursion: bool) -> dict[str, Node]:
    """The rules that `start` needs. Raises GrammarError, naming the rule, for one that is missing, that refers to
    itself before any text, that no text ends, or whose references go too deep.
    """
    if len(rules) > MAX_RULES:
        raise GrammarError("grammar", f"{len(rules)} rules exceed the limit of {MAX_RULES}")
    if start not in rules:
        raise GrammarError("grammar", f"there is no rule {start}")
    for rule, node in rules.items():
        for name in names(node):
            if name not in rules:
                raise GrammarError("grammar", f"rule {rule} refers to {name}, which is not defined")
    order = _reach(rules, start)
    needed = {name: rules[name] for name in order}
    ends = _closure(needed, _can_end)
    for name in needed:
        if name not in ends:
            raise GrammarError("grammar", f"rule {name} never ends: no text matches it")
    if not left_recursion:
        _check_left(needed)
    return needed


def _reach(rules: Rules, start: str) -> list[str]:
    """Rules in the order in which they are met, and that order's depth is bounded: compilers follow it recursively."""
    order, seen = [start], {start}
    stack = [iter(tuple(names(rules[start])))]
    while stack:
        name = next(stack[-1], None)
        if name is None:
            stack.pop()
        elif name not in seen:
            seen.add(name)
            order.append(name)
            stack.append(iter(tuple(names(rules[name]))))
            if len(stack) > MAX_DEPTH:
                raise GrammarError(
                    "grammar", f"rule {name} is more than {MAX_DEPTH} references away from {start}"
                )
    return order


def _closure(rules: Rules, holds: Callable[[Node, set[str]], bool]) -> set[str]:
    """The smallest set of rules for which `holds(node, set)`."""
    found: set[str] = set()
    changed = True
    while changed:
        changed = False
        for name, node in reversed([*rules.items()]):
            if name not in found and holds(node, found):
                found.add(name)
                changed = True
    return found


def _can_end(node: Node, ends: set[str]) -> bool:
    if isinstance(node, RuleRef):
        return node.name in ends
    if isinstance(node, OneOf):
        return bool(bits(node))
    if isinstance(node, Times):
        return node.low == 0 or _can_end(node.part, ends)
    if isinstance(node, Then | Alternatives):
        return (all if isinstance(node, Then) else any)(_can_end(part, ends) for part in node.parts)
    return True


def is_nullable(node: Node, nullable: set[str]) -> bool:
    """Whether a node accepts the empty text, if the rules `nullable` do."""
    if isinstance(node, RuleRef):
        return node.name in nullable
    if isinstance(node, Text):
        return not node.text
    if isinstance(node, Opaque):
        return node.nullable
    if isinstance(node, Times):
        return node.low == 0 or is_nullable(node.part, nullable)
    if isinstance(node, Then | Alternatives):
        return (all if isinstance(node, Then) else any)(is_nullable(part, nullable) for part in node.parts)
    return False


def nullable_rules(rules: Rules) -> set[str]:
    """The rules that accept the empty text."""
    return _closure(rules, is_nullable)


def _check_left(rules: Rules) -> None:
    nullable = nullable_rules(rules)
    lefts = {name: tuple(_left(node, nullable)) for name, node in rules.items()}
    done: set[str] = set()
    for root in rules:
        path: list[str] = []
        stack = [iter((root,))]
        while stack:
            name = next(stack[-1], None)
            if name is None:
                stack.pop()
                if path:
                    done.add(path.pop())
            elif name in path:
                through = " -> ".join([*path[path.index(name) :], name])
                raise GrammarError(
                    "grammar",
                    f"rule {name} is left-recursive ({through}): write a repetition such as item (op item)*, "
                    "or write the grammar in Lark, which allows left recursion",
                )
            elif name not in done:
                path.append(name)
                stack.append(iter(lefts[name]))


def _left(node: Node, nullable: set[str]) -> Iterator[str]:
    """The rules that may come first in a node."""
    if isinstance(node, RuleRef):
        yield node.name
    elif isinstance(node, Times):
        yield from _left(node.part, nullable)
    elif isinstance(node, Alternatives):
        for part in node.parts:
            yield from _left(part, nullable)
    elif isinstance(node, Then):
        for part in node.parts:
            yield from _left(part, nullable)
            if not is_nullable(part, nullable):
                return


def check_repeats(node: Node, field: str, outer: int = 1) -> None:
    """Raise GrammarError when repetitions in each other ask for too many of one thing."""
    stack = [(node, outer)]
    while stack:
        node, count = stack.pop()
        if isinstance(node, Times):
            count *= max(1, node.low, node.high or 0)
            if count > MAX_REPEATS:
                what = f"{{{node.low},{'' if node.high is None else node.high}}}"
                raise GrammarError(
                    field,
                    f"the repetition {what} allows {count} copies of one item, over the limit of {MAX_REPEATS}",
                )
        stack.extend((part, count) for part in children(node))
