"""Keywords about the parts of arrays and objects."""

from __future__ import annotations

from typing import Any

from quire.structured.json_schema.branches import TRUE, Branch, Branches, Seen, atom, one_of_branches
from quire.structured.json_schema.claims import Handler, Use
from quire.structured.json_schema.refusal import MAX_ENDLESS
from quire.structured.json_schema.value_keywords import always, count, readable


def _seen(branches: Branches, use: Use, **seen: Any) -> Branches:
    if not use.tracking:
        return branches
    return tuple(branch._replace(seen=branch.seen.joined(Seen(**seen))) for branch in branches)


def _together(parts: list[Branches]) -> Branches:
    """Atoms of branches that are alone, all in one branch."""
    return (Branch(tuple(one for branches in parts for branch in branches for one in branch.atoms)),)


# Arrays


def _prefix(use: Use) -> Branches:
    """prefixItems; and items, where it is a list."""
    if not isinstance(use.value, list):
        raise use.malformed("a list of schemas")
    if use.kind != "array":
        return always(use)
    parts = []
    for i in range(len(use.value)):
        claim = use.below(use.key, i)
        if use.holds:
            parts.append(() if use.claims.trivial(claim) else atom("at", i, claim))
        else:
            parts.append((Branch((("size", i + 1, MAX_ENDLESS), ("at", i, claim))),))
    if use.holds:
        return _seen(_together(parts), use, items=len(use.value))
    return one_of_branches(parts)


def _from(use: Use, start: int) -> Branches:
    """All items from an index on."""
    if use.kind != "array":
        return always(use)
    claim = use.below(use.key)
    if use.holds:
        return _seen(TRUE if use.claims.trivial(claim) else atom("from", start, claim), use, all_items=True)
    return atom("count", claim, start, 1, MAX_ENDLESS) if use.claims.trivial(claim) is not False else ()


def _items(use: Use) -> Branches:
    if isinstance(use.value, list):
        return _prefix(use)
    prefix = use.schema.get("prefixItems")
    return _from(use, len(prefix) if isinstance(prefix, list) else 0)


def _additional_items(use: Use) -> Branches:
    items = use.schema.get("items")
    return _from(use, len(items)) if isinstance(items, list) else always(use)


def _contains(use: Use) -> Branches:
    low = count(use._replace(key="minContains", value=use.schema.get("minContains", 1)))
    high = count(use._replace(key="maxContains", value=use.schema.get("maxContains", MAX_ENDLESS)))
    if use.kind != "array":
        return always(use)
    claim = use.below(use.key, holds=True)
    if not use.holds:
        less = atom("count", claim, 0, 0, low - 1) if low else ()
        more = atom("count", claim, 0, high + 1, MAX_ENDLESS) if high < MAX_ENDLESS else ()
        return less + more
    if low > high:
        return ()
    branches = TRUE if (low, high) == (0, MAX_ENDLESS) else atom("count", claim, 0, low, high)
    seen = frozenset([claim]) if use.claim.place.draft > 2019 else frozenset()
    return _seen(branches, use, contained=seen)


def _unique_items(use: Use) -> Branches:
    if not isinstance(use.value, bool):
        raise use.malformed("true or false")
    if use.kind != "array" or use.value is False:
        return always(use)
    return atom("unique", use.claim.place) if use.holds else use.refuse("supported only where it must hold")


# Objects


def _properties(use: Use) -> Branches:
    """properties and patternProperties."""
    named = use.key == "properties"
    if named and not isinstance(use.value, dict):
        raise use.malformed("an object of schemas")
    keys = list(use.value) if named else use.claims.patterns(use)
    if keys is None:
        return TRUE
    if use.kind != "object":
        return always(use)
    parts: list[Branches] = []
    for key in keys:
        claim = use.below(use.key, key)
        if named:
            readable(use, key)
            there = () if use.holds else (("has", key, True),)
            parts.append((Branch((*there, ("prop", key, claim))),))
        elif use.holds:
            parts.append(atom("match", key, claim))
        else:
            parts.append(atom("some", key, frozenset(), frozenset(), claim, None))
    if use.holds:
        return _seen(_together(parts), use, **{"keys" if named else "patterns": frozenset(keys)})
    return one_of_branches(parts)


def _additional_properties(use: Use) -> Branches:
    patterns = use.claims.patterns(use)
    if patterns is None:
        return TRUE
    if use.kind != "object":
        return always(use)
    claim = use.below(use.key)
    trivial = use.claims.trivial(claim)
    named = use.schema.get("properties", {})
    keys = frozenset(named) if isinstance(named, dict) else frozenset()
    if use.holds:
        branches = TRUE if trivial else atom("rest", keys, frozenset(patterns), claim)
        return _seen(branches, use, rest=True)
    return () if trivial is False else atom("some", None, keys, frozenset(patterns), claim, None)


def _required(use: Use) -> Branches:
    if not isinstance(use.value, list) or not all(isinstance(key, str) for key in use.value):
        raise use.malformed("a list of strings")
    if use.kind != "object":
        return always(use)
    for key in use.value:
        readable(use, key)
    parts = [atom("has", key, use.holds) for key in dict.fromkeys(use.value)]
    return _together(parts) if use.holds else one_of_branches(parts)


def _property_names(use: Use) -> Branches:
    if use.kind != "object":
        return always(use)
    claim = use.below(use.key)
    if use.holds:
        return TRUE if use.claims.trivial(claim) else atom("names", claim)
    return atom("some", None, frozenset(), frozenset(), None, claim)


HANDLERS: dict[str, Handler] = {
    "prefixItems": _prefix,
    "items": _items,
    "additionalItems": _additional_items,
    "contains": _contains,
    "uniqueItems": _unique_items,
    "properties": _properties,
    "patternProperties": _properties,
    "additionalProperties": _additional_properties,
    "required": _required,
    "propertyNames": _property_names,
}
