"""What rules of values share: the rule of each set of claims, and values that can be listed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from quire.structured.json_schema.branches import KINDS, Atom, Claim
from quire.structured.json_schema.claims import Claims, ClaimSet, booleans
from quire.structured.json_schema.grammar_rules import NEVER, Expr, GrammarRules
from quire.structured.json_schema.languages import Language
from quire.structured.json_schema.number_sets import gather_numbers, number_text, unique_numbers
from quire.structured.json_schema.refusal import MAX_ROOM
from quire.structured.json_schema.string_sets import json_text, literal, quoted_expression
from quire.structured.unique_needs import UniqueNeeds


class Scalars(NamedTuple):
    """Texts of scalars, one of each value, as an expression of a terminal; `room`: how many, at most MAX_ROOM; `tails`:
    they may run out behind what has been written of one.
    """

    expression: str
    room: int
    tails: bool


class RuleContext:
    """What the rules of arrays and objects need of the others: rules of their parts, and sets of strings."""

    def __init__(self, claims: Claims, whitespace: str | None) -> None:
        self.claims, self.whitespace = claims, whitespace
        self.rules = GrammarRules()
        self.unique: UniqueNeeds | None = None  # what the rules leave to be followed
        self._made: dict[ClaimSet, Expr] = {}
        self._todo: deque[ClaimSet] = deque()

    def refuse(self, state: ClaimSet, keyword: str, message: str) -> None:
        """Refuse a keyword of the first schema of a state that has it."""
        places = [claim.place for claim in state]
        having = [place for place in places if isinstance(place.schema, dict) and keyword in place.schema]
        self.claims.refuse((having or places)[0], keyword, message)

    def follow(self, *, items: bool = False, tails: bool = False) -> None:
        """Keys, or items, are to be unique that the rules do not tell apart."""
        before = self.unique or UniqueNeeds(compact=self.whitespace is None)
        self.unique = replace(before, items=before.items or items, tails=before.tails or tails)

    def value_of(self, claims: Iterable[Claim]) -> Expr:
        """The rule of a value for which all claims hold."""
        state = self.claims.state(claims)
        if state is None:
            return NEVER
        if state not in self._made:
            self._made[state] = self.rules.reserve()
            self._todo.append(state)
        return self._made[state]

    def language_of(self, claims: Iterable[Claim]) -> Language:
        """The strings for which all claims hold."""
        state, of = self.claims.state(claims), self.claims.strings.languages
        if state is None:
            return of.never
        options = []
        for branch in self.claims.of_state(state, "string"):
            strings = self.claims.strings.gather(branch.atoms)
            if strings is not None:
                words = strings.listed
                options.append(strings.language if words is None else of.words(strings.values(of, 0) or []))
        return of.alt(*options)

    def scalars(self, claims: Iterable[Claim]) -> Scalars | None:
        """The values for which the claims hold; None if they are not scalars alone, or not seen to be many or few."""
        claims = list(claims)
        state = self.claims.state(claims)
        found = list[Scalars]()
        for kind in KINDS if state is not None else ():
            branches = self.claims.of_state(state or (), kind)
            if not branches:
                continue
            if kind == "string":
                of, language = self.claims.strings.languages, self.language_of(claims)
                if not of.empty(language):
                    room, text = of.count(language, MAX_ROOM), quoted_expression(of, language)
                    found.append(Scalars(text, room, not of.endless(language)))
            elif kind == "number":
                numbers = [made for branch in branches if (made := gather_numbers(branch.atoms)) is not None]
                unique = unique_numbers(numbers[0]) if len(numbers) == 1 else None
                if unique is None:
                    return None
                found.append(Scalars(*unique))
            else:
                words = dict[str, None]()
                for branch in branches:
                    listed = self._listed(kind, branch.atoms, MAX_ROOM)
                    if listed is None:
                        return None
                    words |= dict.fromkeys(listed)
                found.append(Scalars(" | ".join(map(literal, words)), len(words), True))
        whole = " | ".join(one.expression for one in found)
        return Scalars(whole, min(sum(one.room for one in found), MAX_ROOM), any(one.tails for one in found))

    def listed(self, claims: Iterable[Claim], limit: int = 64) -> list[str] | None:
        """Literals of all values for which the claims hold, if they are scalars and at most `limit`."""
        state, out = self.claims.state(claims), dict[str, None]()
        if state is None:
            return []
        for kind in KINDS:
            for branch in self.claims.of_state(state, kind):
                words = self._listed(kind, branch.atoms, limit)
                if words is None:
                    return None
                out.update(dict.fromkeys(literal(word) for word in words))
        return list(out) if len(out) <= limit else None

    def _listed(self, kind: str, atoms: tuple[Atom, ...], limit: int) -> list[str] | None:
        if kind in {"null", "boolean"}:
            return ["null"] if kind == "null" else [str(one).lower() for one in booleans(atoms)]
        if kind == "number":
            numbers = gather_numbers(atoms)
            values = [] if numbers is None else numbers.values(limit)
            return None if values is None else [number_text(value) for value in values]
        if kind == "string":
            strings = self.claims.strings.gather(atoms)
            words = [] if strings is None else strings.values(self.claims.strings.languages, limit)
            return None if words is None else [json_text(word) for word in words]
        return None
