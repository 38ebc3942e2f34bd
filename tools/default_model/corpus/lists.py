"""Kinds of things and their members, from `tasks/lists.txt`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .draw import Draw
from .tasks import sections


@dataclass(frozen=True, slots=True)
class Category:
    """A kind of things: what people call many of them (the first for answers), what one is called, and the things."""

    plurals: tuple[str, ...]
    one: str
    members: tuple[str, ...]


@cache
def categories() -> tuple[Category, ...]:
    found = []
    for heading, lines in sections("lists").items():
        plurals, one = heading.split(" = ")
        things = tuple(thing for line in lines for thing in line.split(", "))
        found.append(Category(tuple(plurals.split("|")), one, things))
    return tuple(found)


def things_of_a_kind(draw: Draw) -> tuple[str, tuple[str, ...]]:
    """The name of a larger kind and those of its things that are one word."""
    kind = draw.pick([c for c in categories() if len(c.members) >= 12 and " " not in c.plurals[0]])
    return kind.plurals[0], tuple(m for m in kind.members if " " not in m)


def written(form: str, items: list[str]) -> str:
    """A list with commas, bullets or numbers."""
    if form == "commas":
        return ", ".join(items)
    return "\n".join(f"{n}. {item}" if form == "numbers" else f"- {item}" for n, item in enumerate(items, 1))
