"""The chapters of the lesson: Markdown with a head in TOML, with numbers that are computed, and with directives.

A directive is a line `:::NAME WORDS`; those of `_BODIES` have a body up to a line `:::`:

- `:::simulation NAME control=value…`, `:::listing NAME` and `:::see NAME` show one;
- `:::worked` lists published figures by their place, a line each, and shows them beside the right ones;
- `:::exercise LEVEL` and `:::question TEXT` have an answer behind a line `---`; a question's first line is
  `run: quire …`, the command that demonstrates the answer, its second `shows: …`, a part of what that prints;
- `:::note` is set apart, `:::rubric` lists what a reader can do after the chapter.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quire.learn.chapter_numbers import number
from quire.planner.worked import worked_figures
from quire.records import dataclass
from quire.util.likeness import did_you_mean
from quire.util.markdown import MarkdownNode, blocks, inline

_FOLDER = Path(__file__).with_name("chapters")
_BODIES = frozenset(("worked", "exercise", "question", "note", "rubric"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A chapter as it is written. `number` is None for pages beside the path; `given` are the numbers that the text
    takes as given, each with its source; `simulations` are those that it shows.
    """

    number: int | None
    name: str
    title: str
    about: str
    given: Mapping[str, str]
    text: str

    @property
    def simulations(self) -> list[str]:
        """The simulations that it shows, by name."""
        return [words.split()[0] for name, words, _ in directives(self.text) if name == "simulation"]

    def page(self) -> list[MarkdownNode]:
        """Its blocks; numbers are computed now. Raises ValueError for a reference that leads nowhere."""
        return [*_shown(self.text)]


@cache
def chapters() -> Mapping[str, Chapter]:
    """All by name: the chapters by number, then the pages beside them."""
    found = [_read(path) for path in sorted(_FOLDER.glob("*.md"))]
    return {one.name: one for one in sorted(found, key=lambda one: 99 if one.number is None else one.number)}


def chapter(name: str) -> Chapter:
    """The chapter of a name or a number. Raises ValueError for an unknown one."""
    known = chapters()
    for one in known.values():
        if name == one.name or (one.number is not None and name == str(one.number)):
            return one
    raise ValueError(f"name: no chapter {name!r}{did_you_mean(name, known)}")


def _read(path: Path) -> Chapter:
    head, _, text = path.read_text(encoding="utf-8").removeprefix("+++\n").partition("\n+++\n")
    first, _, rest = path.stem.partition("-")
    number, name = (int(first), rest) if first.isdigit() else (None, path.stem)
    return Chapter(number=number, name=name, text=text, **({"given": {}} | tomllib.loads(head)))


def directives(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, words and body of each directive; plain Markdown between them has the name ""."""
    lines, plain = iter(text.splitlines()), list[str]()
    for line in lines:
        if not line.startswith(":::"):
            plain.append(line)
            continue
        yield "", "", "\n".join(plain)
        plain.clear()
        name, _, words = line[3:].partition(" ")
        body: list[str] = []
        if name in _BODIES:
            body = [*iter(lambda: next(lines, ":::"), ":::")]
        yield name, words.strip(), "\n".join(body)
    yield "", "", "\n".join(plain)


def _shown(text: str) -> Iterator[MarkdownNode]:
    for name, words, body in directives(text):
        if not name:
            yield from blocks(body, _number)
        elif name in _SHOWN:
            yield {"kind": name} | _SHOWN[name](words, body)
        else:
            raise ValueError(f":::{name}: no such directive{did_you_mean(name, _SHOWN)}")


def _number(reference: str) -> MarkdownNode:
    return {"kind": "number"} | number(reference)._asdict()


def _simulation(words: str, _: str) -> dict[str, Any]:
    name, *values = shlex.split(words)
    return {"name": name, "values": dict(one.split("=", 1) for one in values)}


def _named(words: str, _: str) -> dict[str, Any]:
    return {"name": words}


def _worked(_: str, body: str) -> dict[str, Any]:
    known = {one.place: one for one in worked_figures()}
    unknown = [place for place in body.splitlines() if place not in known]
    if unknown:
        raise ValueError(f"worked: no figure {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    rows = [known[place] for place in body.splitlines()]
    return {
        "figures": [
            {
                "place": one.place, "printed": one.printed, "note": one.note,
                "right": number(f"{one.command} | {one.figure}")._asdict(),
            }
            for one in rows
        ]
    }  # fmt: skip


def _exercise(words: str, body: str) -> dict[str, Any]:
    asked, answer = _halves(body)
    return {"level": words, "blocks": blocks(asked, _number), "answer": blocks(answer, _number)}


def _question(words: str, body: str) -> dict[str, Any]:
    asked, answer = _halves(body)
    run = asked.splitlines()[0].removeprefix("run: ")
    return {"inline": inline(words), "run": run, "answer": blocks(answer, _number)}


def _halves(body: str) -> tuple[str, str]:
    asked, found, answer = body.partition("\n---\n")
    if not found:
        raise ValueError(f"{body.splitlines()[0]!r}: needs an answer behind ---")
    return asked, answer


def _note(_: str, body: str) -> dict[str, Any]:
    return {"blocks": blocks(body, _number)}


_SHOWN: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "simulation": _simulation, "listing": _named, "see": _named, "worked": _worked, "exercise": _exercise,
    "question": _question, "note": _note, "rubric": _note,
}  # fmt: skip
