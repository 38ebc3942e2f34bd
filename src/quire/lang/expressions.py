"""What a generation program adds to its text: generated text, a choice, turns of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from quire.records import dataclass
from quire.types import RequestError, SamplingParams
from quire.util.likeness import did_you_mean

Rule = Literal["sum", "mean"]
_FIELDS = tuple(field.name for field in fields(SamplingParams))


class Expression:
    """Part of a program's text. Expressions and texts can be added: "Answer: " + gen("answer")."""

    __slots__ = ()

    def __add__(self, other: str | Expression) -> Sum:
        return Sum((*terms(self), *terms(other)))

    def __radd__(self, other: str) -> Sum:
        return Sum((*terms(other), *terms(self)))


@dataclass(frozen=True, slots=True)
class Sum(Expression):
    """Several terms, one after the other."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Gen(Expression):
    """Text to generate; `sampling` are fields of SamplingParams."""

    name: str | None
    sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Select(Expression):
    """The most probable of some choices."""

    name: str | None
    choices: tuple[str, ...]
    by: Rule


@dataclass(frozen=True, slots=True)
class TurnStart(Expression):
    """What follows belongs to a turn of this role."""

    role: str


@dataclass(frozen=True, slots=True)
class TurnEnd(Expression):
    """The turn is complete."""


Term = str | Gen | Select | TurnStart | TurnEnd


def terms(part: str | Expression) -> tuple[Term, ...]:
    """The terms of a text or an expression. Raises TypeError for anything else."""
    if isinstance(part, str):
        return (part,)
    if isinstance(part, Sum):
        return part.terms
    if isinstance(part, Gen | Select | TurnStart | TurnEnd):
        return (part,)
    raise TypeError(f"a program takes text, gen, select and turns, not {type(part).__name__}")


def gen(
    name: str | None = None,
    *,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    json: Any = None,
    **sampling: Any,
) -> Gen:
    """Text to generate, kept under `name`.

    `sampling` are fields of SamplingParams; others have the state's values, or those that the checkpoint recommends.
    `regex`, `choices` and `json`, a schema, say what the text must look like. Raises RequestError or TypeError.
    """
    for field in sampling:
        if field not in _FIELDS:
            raise TypeError(f"gen: {field} is not a field of SamplingParams{did_you_mean(field, _FIELDS)}")
    asked = {"regex": regex, "choice": choices, "json": json}
    if asked := {field: value for field, value in asked.items() if value is not None}:
        from quire.structured.ask import StructuredOutput

        sampling["structured"] = StructuredOutput(**asked)
    if SamplingParams(**sampling).n != 1:
        raise RequestError("n", "must be 1; fork the state to continue in several ways")
    return Gen(name, sampling)


def select(name: str | None = None, choices: Sequence[str] = (), *, by: Rule = "sum") -> Select:
    """The most probable of `choices`, kept under `name`; the first one on ties.

    `by` "sum" compares the probabilities of the choices, "mean" their mean log-probability per token. A choice that
    begins another one has, by "sum", the probability of going on with it and not with the longer one. Raises
    RequestError.
    """
    if isinstance(choices, str) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise RequestError("choices", "must be a list of strings that are not empty")
    if len(set(choices)) < len(choices):
        raise RequestError("choices", "must be distinct")
    if by not in {"sum", "mean"}:
        raise RequestError("by", f"must be 'sum' or 'mean', not {by!r}")
    return Select(name, tuple(choices), by)


def system(*parts: str | Expression) -> Sum:
    """A turn of the system."""
    return turn("system", parts)


def user(*parts: str | Expression) -> Sum:
    """A turn of the user."""
    return turn("user", parts)


def assistant(*parts: str | Expression) -> Sum:
    """A turn of the assistant."""
    return turn("assistant", parts)


def turn(role: str, parts: Sequence[str | Expression]) -> Sum:
    """A turn of any role that the chat template knows."""
    inner = (term for part in parts for term in terms(part))
    return Sum((TurnStart(role), *inner, TurnEnd()))
