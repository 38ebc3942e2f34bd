"""Tables of facts in text files, and questions about a row of one.

`tables/NAME.txt` has one row a line, columns between "|", their names in the first line; "-" stands for nothing. The
entries of `faq/NAME.txt` speak of one row: "{country}" is a column of it, "{a_animal}" the same with "a" or "an",
"{bare_it}" without one, "{s_animal}" its plural, "{other_country}" the column of another row, of the same "group" if there is such a column, in which all columns named
so differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import faq
from .conversation import Turn, assistant, user
from .draw import Draw
from .wording import expand, plain, typed
from .words import article, plural

_FOLDER = Path(__file__).with_name("tables")
_KNOWN = 0.7  # of the questions are about row n as often as 1 / (n + 2): tables begin with what is best known
_ARTICLE = re.compile(r"^(a|an|the) ")
_SLOT = re.compile(r"\{(other_)?(a_|s_|bare_)?(\w+?)\}")
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Relation:
    """A faq entry over a table, the rows that have all it speaks of, and columns that another row must differ in."""

    entry: faq.Entry
    rows: tuple[Row, ...]
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A relation and a row: question, answer, what the answer must hold, and its core."""

    relation: Relation
    row: Row
    asked: str
    said: str
    must: tuple[str, ...]

    @property
    def core(self) -> str:
        """The answer in as few words as possible."""
        return self.must[0].split("|")[0] if self.must else ""

    def turns(self, draw: Draw, topic: str) -> list[Turn]:
        check = faq.contains(self.must, topic)
        return [user(typed(draw, [self.asked])), assistant(self.said, check)]


@cache
def rows(name: str) -> tuple[Row, ...]:
    """The rows of `tables/NAME.txt`. Raises ValueError with the line that has another number of columns."""
    lines = (_FOLDER / f"{name}.txt").read_text().splitlines()
    columns = [c.strip() for c in lines[0].split("|")]
    made: list[Row] = []
    for number, line in enumerate(lines[1:], 2):
        if not line or line.startswith("#"):
            continue
        cells = [c.strip() for c in line.split("|")]
        if len(cells) != len(columns):
            raise ValueError(f"{name}.txt:{number}: {len(cells)} columns instead of {len(columns)}")
        made.append(dict(zip(columns, cells, strict=True)))
    return tuple(made)


@cache
def pools(name: str) -> Mapping[str, tuple[str, ...]]:
    """The lists of `tables/NAME.txt`: a line "name: item; item; …" each; a name may come again."""
    made: dict[str, tuple[str, ...]] = {}
    for line in (_FOLDER / f"{name}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            key, items = line.split(":", 1)
            made[key] = made.get(key, ()) + tuple(i.strip() for i in items.split(";") if i.strip())
    return made


def slots_of(pattern: str) -> list[str]:
    """The columns that a pattern speaks of."""
    return [m[3] for m in _SLOT.finditer(pattern)]


@cache
def relations(name: str) -> tuple[Relation, ...]:
    """What can be asked of the table."""
    return tuple(_relation(entry, rows(name)) for entry in faq.load(name))


def _relation(entry: faq.Entry, table: tuple[Row, ...]) -> Relation:
    found = [m for text in (*entry.asks, *entry.answers, *entry.must) for m in _SLOT.finditer(text)]
    columns = {m[3] for m in found}
    usable = tuple(row for row in table if all(row[c] != "-" for c in columns))
    return Relation(entry, usable, tuple(sorted({m[3] for m in found if m[1]})))


def _slots(row: Row, other: Row) -> dict[str, str]:
    slots = {**row, **{f"other_{k}": v for k, v in other.items()}}
    for column, value in list(slots.items()):
        place = "other_" if column.startswith("other_") else ""
        slots[f"{place}a_{column.removeprefix('other_')}"] = article(value)
        slots[f"{place}s_{column.removeprefix('other_')}"] = plural(value)
        slots[f"{place}bare_{column.removeprefix('other_')}"] = _ARTICLE.sub("", value)
    return slots


def fact(draw: Draw, relation: Relation, row: Row) -> Fact:
    """The relation of this row in one of its wordings."""
    other = row
    if relation.differing:
        others = [
            r
            for r in relation.rows
            if r.get("group") == row.get("group") and all(r[c] != row[c] for c in relation.differing)
        ]
        other = draw.pick(others)
    slots = _slots(row, other)
    entry = relation.entry
    asked = expand(draw, draw.pick(entry.asks)).format_map(slots)
    said = expand(draw, draw.pick(entry.answers)).format_map(slots).replace("\\n", "\n")
    must = tuple(m.format_map(slots) for m in entry.must)
    return Fact(relation, row, faq.capitalised(asked), faq.sentences(said.replace("D.C..", "D.C.")), must)


def any_fact(draw: Draw, name: str, topic: str) -> Fact:
    """A question about the table, often what has many wordings; its wording belongs to one split."""

    def make() -> Fact:
        relation = draw.weighted([(r, len(r.entry.asks)) for r in relations(name)])
        if draw.chance(_KNOWN):
            row = draw.weighted([(row, 1 / (n + 2)) for n, row in enumerate(relation.rows)])
        else:
            row = draw.pick(relation.rows)
        return fact(draw, relation, row)

    return draw.held(make, lambda f: f"{topic}|{plain(f.asked)}")
