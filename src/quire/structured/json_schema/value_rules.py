"""The grammar of values: a rule for each set of claims that must hold together."""

from __future__ import annotations

import json
from collections.abc import Iterable

from quire.structured.json_schema.array_rules import array_rule
from quire.structured.json_schema.branches import KINDS, Atom, Claim
from quire.structured.json_schema.claims import Claims, State, booleans
from quire.structured.json_schema.grammar_rules import NEVER, Expr, GrammarRules, alt, text
from quire.structured.json_schema.languages import Language
from quire.structured.json_schema.number_sets import (
    ANY_NUMBER,
    gather_numbers,
    json_number,
    number_expression,
    number_text,
)
from quire.structured.json_schema.object_rules import object_rule
from quire.structured.json_schema.refusal import OverLimitError
from quire.structured.json_schema.string_sets import json_text, literal


class ValueRules:
    """Writes the rules of a document's claims."""

    def __init__(self, claims: Claims, whitespace: str | None) -> None:
        self.claims, self.whitespace = claims, whitespace
        self.rules = GrammarRules()
        self._made: dict[State, Expr] = {}
        self._todo: list[State] = []

    def refuse(self, state: State, keyword: str, message: str) -> None:
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

    def write(self) -> None:
        """Define the rules of all values that were asked for."""
        while self._todo:
            state = self._todo.pop()
            options = []
            for kind in KINDS:
                for branch in self.claims.of_state(state, kind):
                    options.append(self._of_atoms(kind, branch.atoms, state))
            self.rules.define(self._made[state], alt(*(one for one in options if one != NEVER)))

    def _of_atoms(self, kind: str, atoms: tuple[Atom, ...], state: State) -> Expr:
        try:
            if kind == "null":
                return text('"null"')
            if kind == "boolean":
                return self.rules.terminal(" | ".join(f'"{str(one).lower()}"' for one in sorted(booleans(atoms))))
            if kind == "number":
                return self._numbers(atoms, state)
            if kind == "string":
                return self._strings(atoms)
            return array_rule(self, atoms, state) if kind == "array" else object_rule(self, atoms, state)
        except OverLimitError as error:
            keyword = "patternProperties" if kind == "object" else "pattern"
            self.refuse(state, keyword, str(error))
            return NEVER

    def _numbers(self, atoms: tuple[Atom, ...], state: State) -> Expr:
        numbers = gather_numbers(atoms)
        if numbers is None or numbers.empty():
            return NEVER
        expression = number_expression(numbers)
        if expression is not None:
            return self.rules.terminal(expression)
        schema = json_number(numbers, self.whitespace)
        if schema is None:
            self.refuse(state, "multipleOf", "this step cannot be enforced together with the other conditions")
            return self.rules.terminal(ANY_NUMBER)
        return self.rules.rule(Expr("seq", (text(f"%json {json.dumps(schema)}"), Expr("seq"))))

    def _strings(self, atoms: tuple[Atom, ...]) -> Expr:
        strings = self.claims.strings.gather(atoms)
        expression = None if strings is None else self.claims.strings.expression(strings)
        return NEVER if expression is None else self.rules.terminal(expression)

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
                options.append(
                    strings.language if words is None else of.words(strings.values(of, 0) or [])
                )
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
