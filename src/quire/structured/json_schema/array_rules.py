"""The grammar of arrays: items by their place, counted ones, and unique ones."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from quire.structured.ask import JSON_SPACE
from quire.structured.grammar_limits import MAX_INDENTATION
from quire.structured.json_schema.branches import Atom, Claim
from quire.structured.json_schema.claims import ClaimSet, item_claims, sizes
from quire.structured.json_schema.grammar_rules import (
    EMPTY,
    NEVER,
    Expr,
    alt,
    header,
    rep,
    seq,
    text,
)
from quire.structured.json_schema.languages import repeated
from quire.structured.json_schema.refusal import MAX_ENDLESS, MAX_MACHINE, MAX_ROOM
from quire.structured.json_schema.rule_context import RuleContext

MAX_UNIQUE = 64  # values that unique items may have: bits of a rule's parameter
UNIQUE_REFUSAL = (
    "items can be held unique if they are strings, numbers, booleans or null, all of one schema; not beside "
    "`contains`, nor in JSON without white space"
)
_COMMA, _OPEN, _CLOSE = text('","'), text('"["'), text('"]"')


class _Counted(NamedTuple):
    claim: Claim
    start: int
    low: int
    high: int

    @property
    def top(self) -> int:
        """From here on, more makes no difference."""
        return self.low if self.high >= MAX_ENDLESS else self.high + 1


def array_rule(values: RuleContext, atoms: tuple[Atom, ...], state: ClaimSet) -> Expr:
    """The arrays that satisfy all atoms."""
    low, high = sizes(atoms)
    counted = [_Counted(*one[1:]) for one in atoms if one[0] == "count"]
    starts = [one[1] + (one[0] == "at") for one in atoms if one[0] in {"at", "from"}]
    last = max([1, *starts, *(one.start for one in counted)])
    if last > MAX_MACHINE:
        values.refuse(state, "prefixItems", f"more than {MAX_MACHINE} items have schemas of their own")
        last = MAX_MACHINE
    if high > 1 and any(one[0] == "unique" for one in atoms):
        found = None if counted else _unique(values, atoms, last) or _followed(values, atoms, last)
        if found is not None:
            return found
        place = next(one[1] for one in atoms if one[0] == "unique")
        values.claims.refuse(place, "uniqueItems", UNIQUE_REFUSAL)
    if counted:
        return _counted(values, atoms, state, last, counted)
    end = None if high >= MAX_ENDLESS else high
    item = values.value_of(item_claims(atoms, last))
    after = rep(seq(_COMMA, item), low - last, None if end is None else end - last) if high > last else EMPTY
    if last < low and high <= last:
        return NEVER
    for i in range(last - 1, -1, -1):
        item = values.value_of(item_claims(atoms, i))
        more = seq(_COMMA, item, after) if i else seq(item, after)
        after = alt(EMPTY if i >= low else NEVER, more if i < high else NEVER)
        after = values.rules.rule(after) if i else after
    return seq(_OPEN, after, _CLOSE)


def _counted(
    values: RuleContext, atoms: tuple[Atom, ...], state: ClaimSet, last: int, counted: list[_Counted]
) -> Expr:
    """A machine over the index, as far as it matters, the number of items, and the items of each kind."""
    low, high = sizes(atoms)
    longest = max(low, high + 1 if high < MAX_ENDLESS else 0, last)
    size = (longest + 1) if longest > last else last + 1
    for one in counted:
        size *= one.top + 1
        if size > MAX_MACHINE:
            values.refuse(state, "contains", f"counting items takes more than {MAX_MACHINE} states")
            return array_rule(values, tuple(one for one in atoms if one[0] != "count"), state)
    start = (0, *(0 for _ in counted))
    rules = {start: values.rules.reserve()}
    todo = [start]
    while todo:
        now = todo.pop()
        index, *counts = now
        options = []
        done = low <= index <= high and all(
            one.low <= n <= one.high for one, n in zip(counted, counts, strict=True)
        )
        loops = []
        for hits in product((True, False), repeat=len(counted)):
            step = _step(values, atoms, counted, counts, index, hits, last)
            if step is None or index >= high:
                continue
            item, after = step
            then = (min(index + 1, longest), *after)
            if then not in rules:
                rules[then] = values.rules.reserve()
                todo.append(then)
            if then == now:
                loops.append(seq(_COMMA, item))
            else:
                options.append(seq(_COMMA if index else EMPTY, item, rules[then]))
        body = alt(*options, *([EMPTY] if done else []))
        values.rules.define(rules[now], seq(rep(alt(*loops), 0, None), body) if loops else body)
    return seq(_OPEN, rules[start], _CLOSE)


def _step(
    values: RuleContext,
    atoms: tuple[Atom, ...],
    counted: list[_Counted],
    counts: list[int],
    index: int,
    hits: tuple[bool, ...],
    last: int,
) -> tuple[Expr, list[int]] | None:
    """An item that some counts take, and the counts after it; None where no count changes by it as asked."""
    claims, after = item_claims(atoms, min(index, last)), []
    for one, n, hit in zip(counted, counts, hits, strict=True):
        if index < one.start or (n == one.top and one.high >= MAX_ENDLESS):
            if hit:
                return None
            after.append(n)
            continue
        if hit:
            claims.append(one.claim)
        elif one.high < MAX_ENDLESS:
            claims.append(one.claim.opposite())
        after.append(min(n + hit, one.top))
        if after[-1] > one.high:
            return None
    item = values.value_of(claims)
    return None if item == NEVER else (item, after)


def _unique(values: RuleContext, atoms: tuple[Atom, ...], last: int) -> Expr | None:
    """Arrays of different values, a bit of the rules' parameter for each; None if they are too many."""
    low, high = sizes(atoms)
    places = [values.listed(item_claims(atoms, i)) for i in range(last + 1)]
    if any(found is None for found in places):
        return None
    bits = {one: i for i, one in enumerate(dict.fromkeys(one for found in places for one in found or ()))}
    alike = all(found == places[0] for found in places)
    if len(bits) > MAX_UNIQUE or (low > 0 and not alike):
        return None
    if low > len(bits):
        return NEVER
    name = values.rules.name("u")
    lines = []
    for i, found in enumerate(places):
        if not found:
            break
        comma = '"," ' if i else ""
        end = f'"" %if bit_count_ge(_, {low})' if low else '""'
        options = [end]
        then = min(i + 1, last)
        for one in found:
            bit = bits[one]
            unused = (
                f"bit_clear({bit})"
                if high >= MAX_UNIQUE
                else f"and(bit_clear({bit}), bit_count_lt(_, {high}))"
            )
            after = f"{name}x{then}::set_bit({bit}) " if places[then] else ""
            options.append(f"{comma}{one} {after}%if {unused}")
        lines.append(f"{name}x{i}::_ : {' | '.join(options)}")
    if not lines:
        return seq(_OPEN, _CLOSE)
    values.rules.raw(lines)
    return seq(_OPEN, text(f"{name}x0::0x0"), _CLOSE)


def _followed(values: RuleContext, atoms: tuple[Atom, ...], last: int) -> Expr | None:
    """Arrays of scalars of one schema, whose items are followed beside the grammar; None for others.

    White space with one space more than elsewhere says that the items of an array are followed.
    """
    claims = item_claims(atoms, 0)
    found = values.scalars(claims)
    if (
        found is None
        or values.whitespace is None
        or any(item_claims(atoms, i) != claims for i in range(1, last + 1))
    ):
        return None
    low, high = sizes(atoms)
    if found.room < MAX_ROOM:
        high = min(high, found.room)
    if low > high:
        return NEVER
    if high == 0:
        return seq(_OPEN, _CLOSE)
    values.follow(items=True, tails=found.tails)
    more = (
        f'("," item){repeated(max(low - 1, 0), high - 1 if high < MAX_ENDLESS else None)}' if high > 1 else ""
    )
    body = f"( item {more} ){'?' if low == 0 else ''}"
    space = header(JSON_SPACE.replace(f",{MAX_INDENTATION}", f",{MAX_INDENTATION + 1}"))
    inside = f'start: "[" {body} "]"\nitem: ITEM\nITEM: {found.expression}'
    return values.rules.rule(Expr("seq", (text(f"%lark {{\n{space}\n{inside}\n}}"), Expr("seq"))))
