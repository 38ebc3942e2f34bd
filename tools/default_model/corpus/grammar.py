"""Texts from grammars: files of named sections, whose lines are patterns that name other sections.

    # a comment
    @start
    In the <time> {name} <did>[ and <did>]. {^he} was happy.
    @time
    (early|late) morning
    afternoon

A line is a pattern of `wording`: "(a|b)", "[x]". "<time>" expands the section anew each time; "{time}" is expanded once
in a text and repeated after that, and "{time1}", "{time2}" come from different lines. "<^time>" and "{^time}" begin with a
capital. "\\n" is a new line; "a" becomes "an" before a vowel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from .draw import Draw
from .wording import Node, parse
from .words import articled

_FOLDER = Path(__file__).with_name("grammar")
_SYMBOL = re.compile(r"([<{])(\^?)([a-z_]+)(\d?)[>}]")

Line = tuple[Node, ...]


@dataclass(slots=True)
class _Text:
    """What a text has said: the values of its slots, and the lines of sections that numbered slots took."""

    slots: dict[str, str]
    lines: dict[str, set[int]] = field(default_factory=dict)


class Grammar:
    """Sections by name. `text` says one of them."""

    def __init__(self, sections: Mapping[str, tuple[Line, ...]]) -> None:
        self._sections = sections

    def lines(self, section: str) -> list[str]:
        """The lines of a section that have no choices and no symbols."""
        return [line[0] for line in self._sections[section] if len(line) == 1 and isinstance(line[0], str)]

    def symbols(self, section: str) -> set[str]:
        """The names of sections and slots that a section mentions."""
        return {name for line in self._sections[section] for name in _mentioned(line)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sections)

    def text(self, draw: Draw, section: str, **slots: str) -> str:
        """One text of a section. `slots` are the values of "{…}" that the caller has chosen."""
        said = self._section(draw, section, _Text(dict(slots))).replace("\\n", "\n")
        return articled(said)

    def _section(self, draw: Draw, section: str, text: _Text) -> str:
        return self._line(draw, draw.pick(self._sections[section]), text)

    def _line(self, draw: Draw, line: Line, text: _Text) -> str:
        out = []
        for node in line:
            if isinstance(node, str):
                out += [p if isinstance(p, str) else self._symbol(draw, p, text) for p in _pieces(node)]
            else:
                out.append(self._line(draw, draw.pick(node), text))
        return "".join(out)

    def _symbol(self, draw: Draw, symbol: tuple[str, ...], text: _Text) -> str:
        kind, capital, name, number = symbol
        if kind == "<":
            said = self._section(draw, name + number, text)
        else:
            slot = name + number
            if slot not in text.slots:
                text.slots[slot] = (
                    self._apart(draw, name, text) if number else self._section(draw, name, text)
                )
            said = text.slots[slot]
        return said[:1].upper() + said[1:] if capital else said

    def _apart(self, draw: Draw, section: str, text: _Text) -> str:
        """A line of the section that the text has not said under another number, as long as there is one."""
        lines = self._sections[section]
        said = text.lines.setdefault(section, set())
        at = draw.pick([i for i in range(len(lines)) if i not in said] or range(len(lines)))
        said.add(at)
        return self._line(draw, lines[at], text)


@cache
def _pieces(text: str) -> tuple[str | tuple[str, ...], ...]:
    """Literal text and symbols, in order."""
    out: list[str | tuple[str, ...]] = []
    at = 0
    for match in _SYMBOL.finditer(text):
        if match.start() > at:
            out.append(text[at : match.start()])
        out.append(match.groups())
        at = match.end()
    return (*out, text[at:]) if at < len(text) else tuple(out)


def _mentioned(line: Line) -> Iterator[str]:
    for node in line:
        if isinstance(node, str):
            yield from (piece[2] for piece in _pieces(node) if not isinstance(piece, str))
        else:
            for choice in node:
                yield from _mentioned(choice)


@cache
def load(name: str) -> Grammar:
    """The grammar of `grammar/NAME.txt`. Raises ValueError with the line where it cannot be read."""
    sections: dict[str, list[Line]] = {}
    path = _FOLDER / f"{name}.txt"
    current = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line or line.startswith("# "):
            continue
        if line.startswith("@"):
            current = line[1:]
            if current in sections:
                raise ValueError(f"{path.name}:{number}: section {current!r} is there twice")
            sections[current] = []
            continue
        if not current:
            raise ValueError(f"{path.name}:{number}: a line before the first section")
        try:
            sections[current].append(parse(line))
        except ValueError as error:
            raise ValueError(f"{path.name}:{number}: {error}") from error
    return Grammar({name: tuple(lines) for name, lines in sections.items()})
