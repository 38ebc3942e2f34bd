"""Kinds of things and their members, from `tasks/lists.txt`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .draw import Draw, NoCombinationError
from .tasks import sections

_SKIP = 0.2  # of the members are passed over in a list


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


def in_order(draw: Draw, members: tuple[str, ...], count: int) -> list[str]:
    """`count` of the members in the order of the table, mostly of its first ones: what comes next is nearly certain.

    In any order, every next word would be as likely as all others, and the likeliest answer a repetition.
    Raises NoCombinationError for fewer members.
    """
    spare = len(members) - count
    if spare < 0:
        raise NoCombinationError(f"{count} of {len(members)} members")
    found: list[str] = []
    at = 0
    while len(found) < count:
        while spare and draw.chance(_SKIP):
            at, spare = at + 1, spare - 1
        found.append(members[at])
        at += 1
    return found


def written(form: str, items: list[str]) -> str:
    """A list with commas, bullets or numbers."""
    if form == "commas":
        return ", ".join(items)
    return "\n".join(f"{n}. {item}" if form == "numbers" else f"- {item}" for n, item in enumerate(items, 1))
