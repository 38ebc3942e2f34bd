"""What the small tasks share: wordings and tables read from text files, and requests held apart by what they ask.

A file `tasks/NAME.txt` has sections: a line "== heading", then one pattern or row a line. "#" starts a comment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from .conversation import Check, Turn, assistant, user
from .draw import Draw
from .wording import ask, expand, plain
from .words import listed

FOLDER = Path(__file__).with_name("tasks")
_LOUD = 0.08


@cache
def sections(name: str) -> dict[str, tuple[str, ...]]:
    """The lines of `tasks/NAME.txt` by their headings. Raises ValueError for a line outside a section."""
    found: dict[str, list[str]] = {}
    heading = ""
    for number, line in enumerate((FOLDER / f"{name}.txt").read_text().splitlines(), 1):
        if line.startswith("== "):
            heading = line[3:].strip()
            if heading in found:
                raise ValueError(f"{name}.txt:{number}: a second section {heading!r}")
            found[heading] = []
        elif line.strip() and not line.startswith("#"):
            if not heading:
                raise ValueError(f"{name}.txt:{number}: a line before the first section")
            found[heading].append(line)
    return {heading: tuple(lines) for heading, lines in found.items()}


@cache
def pairs(name: str, heading: str) -> tuple[tuple[str, ...], ...]:
    """The rows of a section, cut at " = "."""
    return tuple(tuple(part.strip() for part in line.split(" = ")) for line in sections(name)[heading])


@cache
def words(name: str, heading: str) -> tuple[str, ...]:
    """The words of a section, cut at spaces."""
    return tuple(dict.fromkeys(" ".join(sections(name)[heading]).split()))


def request(
    draw: Draw,
    topic: str,
    patterns: tuple[str, ...],
    kept: Mapping[str, str] | None = None,
    **slots: str,
) -> str:
    """A request in one of the wordings as people type it; wording and payload together belong to one split."""
    kept = kept or {}

    def key(form: str) -> str:
        for name, value in {**slots, **kept}.items():
            form = form.replace("{" + name + "}", value)
        return f"{topic}|{plain(form)}"

    form = draw.held(lambda: expand(draw, draw.pick(patterns)), key)
    return ask(draw, form, kept, **slots)


def answered(asked: str, said: str, task: str) -> list[Turn]:
    """The request and its only right answer."""
    return [user(asked), assistant(said, Check("exact", {"text": said, "task": task}))]


def loud(draw: Draw, turns: list[Turn]) -> list[Turn]:
    """The turns, now and then with the request in capitals, its payload too, and the answer as it was."""
    first = turns[0]
    if first.role != "user" or not draw.chance(_LOUD):
        return turns
    return [replace(first, content=first.content.upper()), *turns[1:]]


def about(
    draw: Draw,
    topic: str,
    patterns: tuple[str, ...],
    text: str,
    kept: Mapping[str, str] | None = None,
    **slots: str,
) -> str:
    """A request about a text in the slots {t} or {w}: in quotes, on its own line, or as it is."""
    closing = tuple(p for p in patterns if p.endswith((": {t}", ": {w}")))
    if "\n" in text:
        patterns = closing or patterns
    elif closing and draw.chance(0.12):
        patterns, text = closing, f"\n{text}"
    pattern = draw.pick(patterns)
    quotable = "{t}" in pattern and '"{t}"' not in pattern and "\n" not in text
    if quotable and draw.chance(0.25):
        text = draw.pick((f'"{text}"', f'"{text}"', f"'{text}'"))
    return request(draw, topic, (pattern,), {"t": text, "w": text, **(kept or {})}, **slots).replace(
        " \n", "\n"
    )


def listing(draw: Draw, items: list[str]) -> str:
    """A list as people type it: mostly with commas."""
    at = draw.below(20)
    if at < 12 or any(" " in item for item in items):
        return ", ".join(items)
    if at < 16:
        return " ".join(items)
    if at == 16:
        return ",".join(items)
    if at == 17:
        return "\n" + "\n".join(items)
    return listed(items) if at == 18 else "\n" + "\n".join(f"- {item}" for item in items)
