"""Keywords that combine schemas for one value: references, allOf, anyOf, oneOf, not, if, and what is unevaluated."""

from __future__ import annotations

from itertools import combinations

from quire.structured.json_schema.branches import (
    TRUE,
    Branches,
    Claim,
    Scope,
    Seen,
    atom,
    one_of_branches,
)
from quire.structured.json_schema.claims import Handler, Use
from quire.structured.json_schema.refusal import MAX_ENDLESS
from quire.structured.json_schema.schema_documents import Place
from quire.structured.json_schema.value_keywords import always, readable

MAX_TRACKED = 6  # alternatives of anyOf beside unevaluatedProperties: any of them may hold together


def _claims(use: Use) -> list[Claim]:
    if not isinstance(use.value, list) or not use.value:
        raise use.malformed("a list of schemas")
    return [use.below(use.key, i, holds=True) for i in range(len(use.value))]


def _all(use: Use, claims: list[Claim]) -> Branches:
    return use.claims.all_of(claims, use.kind, use.claim.place, use.key, use.tracking)


def _any(use: Use, claims: list[Claim]) -> Branches:
    return one_of_branches([use.claims.expand(claim, use.kind, use.tracking) for claim in claims])


def _opposites(claims: list[Claim]) -> list[Claim]:
    return [claim.opposite() for claim in claims]


def _all_of(use: Use) -> Branches:
    claims = _claims(use)
    return _all(use, claims) if use.holds else _any(use, _opposites(claims))


def _any_of(use: Use) -> Branches:
    claims = _claims(use)
    if not use.holds:
        return _all(use, _opposites(claims))
    if not use.tracking:
        return _any(use, claims)
    if len(claims) > MAX_TRACKED:
        return use.refuse(f"more than {MAX_TRACKED} alternatives beside an unevaluated… keyword")
    some = [few for size in range(1, len(claims) + 1) for few in combinations(claims, size)]
    others = [[claim.opposite() for claim in claims if claim not in few] for few in some]
    return one_of_branches(
        [
            _all(use, [*few, *(rest if use.tracking > 1 else [])])
            for few, rest in zip(some, others, strict=True)
        ]
    )


def _one_of(use: Use) -> Branches:
    claims = _claims(use)
    if use.claims.checking:
        return _any(use, claims) if use.holds else TRUE
    pairs = {
        frozenset(pair) for pair in combinations(range(len(claims)), 2)
        if not use.claims.contradict([claims[i] for i in pair], use.kind)
    }  # fmt: skip
    options = []
    if use.holds:
        for i, claim in enumerate(claims):
            others = [claims[j].opposite() for j in range(len(claims)) if frozenset((i, j)) in pairs]
            options.append(_all(use, [claim, *others]))
    else:
        options.append(_all(use, _opposites(claims)))
        options += [_all(use, [claims[i] for i in sorted(pair)]) for pair in sorted(pairs, key=sorted)]
    return use.claims.limited(one_of_branches(options), use.claim.place, use.key)


def _not(use: Use) -> Branches:
    return use.claims.expand(use.below("not", holds=not use.holds), use.kind)


def _if(use: Use) -> Branches:
    condition = use.below("if", holds=True)
    options = []
    for key, met in (("then", condition), ("else", condition.opposite())):
        claims = [met]
        if key in use.schema:
            claims.append(use.below(key))
        elif not use.holds:
            continue
        options.append(_all(use, claims))
    return one_of_branches(options)


def _follow(use: Use, target: Place, scope: Scope) -> Branches:
    return use.claims.expand(use.claims.claim(target, scope, use.holds), use.kind, use.tracking)


def _ref(use: Use) -> Branches:
    if not isinstance(use.value, str):
        raise use.malformed("a string")
    return _follow(use, use.claims.document.resolve(use.claim.place, use.value), use.claim.scope)


def _dynamic_ref(use: Use) -> Branches:
    """$dynamicRef and $recursiveRef: the outermost schema of the name, among those that led here."""
    if not isinstance(use.value, str):
        raise use.malformed("a string")
    target = use.claims.document.resolve(use.claim.place, use.value, use.key)
    name = use.value.rpartition("#")[2]
    schema = target.schema if isinstance(target.schema, dict) else {}
    dynamic = (
        schema.get("$recursiveAnchor") is True
        if use.key == "$recursiveRef"
        else bool(name) and schema.get("$dynamicAnchor") == name
    )
    return _follow(use, dict(use.claim.scope).get(name, target) if dynamic else target, use.claim.scope)


def _unevaluated(use: Use) -> Branches:
    """`use.value` is what the other keywords of the branch have evaluated."""
    kind = "object" if use.key == "unevaluatedProperties" else "array"
    if use.kind != kind:
        return always(use)
    seen: Seen = use.value
    claim, all_seen = use.below(use.key), seen.rest if kind == "object" else seen.all_items
    if all_seen or use.claims.trivial(claim) == use.holds:
        branches = always(use)
    elif kind == "object":
        atoms = atom("rest", seen.keys, seen.patterns, claim)
        branches = atoms if use.holds else atom("some", None, seen.keys, seen.patterns, claim, None)
    else:
        if seen.contained:
            contained = sorted(seen.contained, key=lambda one: one.place.path)
            claim = use.claims.either([*contained, use.below(use.key, holds=True)], use.claim.place)
            claim = claim if use.holds else claim.opposite()
        branches = atom("from", seen.items, claim)
        branches = branches if use.holds else atom("count", claim, seen.items, 1, MAX_ENDLESS)
    done = Seen(rest=True) if kind == "object" else Seen(all_items=True)
    return tuple(branch._replace(seen=done) for branch in branches)


def _dependent(use: Use) -> Branches:
    """dependentRequired, dependentSchemas, and dependencies, which is both."""
    if not isinstance(use.value, dict):
        raise use.malformed("an object")
    if use.kind != "object":
        return always(use)
    branches, options = TRUE, []
    for key, value in use.value.items():
        readable(use, key)
        if isinstance(value, list) and use.key != "dependentSchemas":
            if not all(isinstance(name, str) for name in value):
                raise use.malformed("lists of strings")
            parts = [atom("has", name, use.holds) for name in value]
        else:
            parts = [use.claims.expand(use.below(use.key, key), use.kind, use.tracking)]
        present, absent = atom("has", key, True), atom("has", key, False)
        then = present
        place = use.claim.place
        if use.holds:
            for part in parts:
                then = use.claims.product(then, part, use.kind, place, use.key)
            branches = use.claims.product(branches, one_of_branches([absent, then]), use.kind, place, use.key)
        else:
            options += [use.claims.product(present, part, use.kind, place, use.key) for part in parts]
    return branches if use.holds else one_of_branches(options)


HANDLERS: dict[str, Handler] = {
    "$ref": _ref,
    "$dynamicRef": _dynamic_ref,
    "$recursiveRef": _dynamic_ref,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependentRequired": _dependent,
    "dependentSchemas": _dependent,
    "dependencies": _dependent,
    "unevaluatedProperties": _unevaluated,
    "unevaluatedItems": _unevaluated,
}
