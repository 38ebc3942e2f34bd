"""What rules of values share: the rule of each set of claims, and values that can be listed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from quire.structured.json_schema.branches import KINDS, Atom, Claim
from quire.structured.json_schema.claims import Claims, ClaimSet, booleans
from quire.structured.json_schema.grammar_rules import NEVER, Expr, GrammarRules
from quire.structured.json_schema.languages import Language
from quire.structured.json_schema.number_sets import gather_numbers, number_text
from quire.structured.json_schema.string_sets import json_text, literal


class RuleContext:
    """What the rules of arrays and objects need of the others: rules of their parts, and sets of strings."""

    def __init__(self, claims: Claims, whitespace: str | None) -> None:
        self.claims, self.whitespace = claims, whitespace
        self.rules = GrammarRules()
        self._made: dict[ClaimSet, Expr] = {}
        self._todo: deque[ClaimSet] = deque()

    def refuse(self, state: ClaimSet, keyword: str, message: str) -> None:
        """Refuse a keyword of the first schema of a state that has it."""
        places = [claim.place for claim in state]
        having = [place for place in places if isinstance(place.schema, dict) and keyword in place.schema]
        self.claims.refuse((having or places)[0], keyword, message)

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
