"""The grammar of values: a rule for each set of claims that must hold together."""

from __future__ import annotations

import json

from quire.structured.json_schema.array_rules import array_rule
from quire.structured.json_schema.branches import KINDS, Atom
from quire.structured.json_schema.claims import ClaimSet, booleans
from quire.structured.json_schema.grammar_rules import NEVER, Expr, alt, text
from quire.structured.json_schema.number_sets import (
    ANY_NUMBER,
    gather_numbers,
    json_number,
    number_expression,
)
from quire.structured.json_schema.object_rules import object_rule
from quire.structured.json_schema.refusal import OverLimitError
from quire.structured.json_schema.rule_context import RuleContext
from quire.structured.json_schema.string_sets import format_expression


class ValueRules(RuleContext):
    """Writes the rules of a document's claims."""

    def write(self) -> None:
        """Define the rules of all values that were asked for."""
        while self._todo:
            state = self._todo.popleft()
            options = []
            for kind in KINDS:
                branches = self.claims.of_state(state, kind)
                options += [self._of_atoms(kind, branch.atoms, state) for branch in branches]
            self.rules.define(self._made[state], alt(*(one for one in options if one != NEVER)))

    def _of_atoms(self, kind: str, atoms: tuple[Atom, ...], state: ClaimSet) -> Expr:
        try:
            if kind == "null":
                return text('"null"')
            if kind == "boolean":
                return self.rules.terminal(
                    " | ".join(f'"{str(one).lower()}"' for one in sorted(booleans(atoms)))
                )
            if kind == "number":
                return self._numbers(atoms, state)
            if kind == "string":
                return self._strings(atoms)
            return array_rule(self, atoms, state) if kind == "array" else object_rule(self, atoms, state)
        except OverLimitError as error:
            keyword = "patternProperties" if kind == "object" else "pattern"
            self.refuse(state, keyword, str(error))
            return NEVER

    def _numbers(self, atoms: tuple[Atom, ...], state: ClaimSet) -> Expr:
        numbers = gather_numbers(atoms)
        if numbers is None or numbers.empty():
            return NEVER
        expression = number_expression(numbers)
        if expression is not None:
            return self.rules.terminal(expression)
        schema = json_number(numbers, self.whitespace)
        if schema is None:
            self.refuse(
                state, "multipleOf", "this step cannot be enforced together with the other conditions"
            )
            return self.rules.terminal(ANY_NUMBER)
        return self.rules.rule(Expr("seq", (text(f"%json {json.dumps(schema)}"), Expr("seq"))))

    def _strings(self, atoms: tuple[Atom, ...]) -> Expr:
        if len(atoms) == 1 and atoms[0][0] == "format" and atoms[0][2]:
            return self.rules.terminal(format_expression(atoms[0][1]))
        strings = self.claims.strings.gather(atoms)
        expression = None if strings is None else self.claims.strings.expression(strings)
        return NEVER if expression is None else self.rules.terminal(expression)
