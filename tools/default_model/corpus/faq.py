"""Questions with their answers, written by hand in text files.

    # a comment
    ? (What is|What's) the capital of France[?]
    ? capital of France
    = Paris.
    = The capital of France is Paris.
    ! Paris

An entry ends at an empty line. "?" lines are patterns of the question, "=" lines patterns of good answers (see
`wording`), "!" names what a right answer contains, "a|b" either. An entry without "!" isn't graded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .conversation import Check, Turn, assistant, user
from .draw import Draw
from .wording import expand, parse, plain, typed

_SENTENCE = re.compile(r"(?<=[a-z][.!?] )[a-z]")
SLOT = re.compile(r"\{(\w+)\}")
_FOLDER = Path(__file__).with_name("faq")


@dataclass(frozen=True, slots=True)
class Entry:
    """Patterns of a question and of its answers, and what a right answer contains."""

    asks: tuple[str, ...]
    answers: tuple[str, ...]
    must: tuple[str, ...]


@cache
def load(name: str) -> tuple[Entry, ...]:
    """The entries of `faq/NAME.txt`. Raises ValueError with the line where it cannot be read."""
    entries: list[Entry] = []
    lines: dict[str, list[str]] = {"?": [], "=": [], "!": []}
    path = _FOLDER / f"{name}.txt"
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        if line.startswith("#"):
            continue
        kind, text = line[:1], line[2:]
        if not kind:
            if any(lines.values()):
                if not (lines["?"] and lines["="]):
                    raise ValueError(f"{path.name}:{number}: an entry needs '?' and '=' lines")
                entries.append(Entry(tuple(lines["?"]), tuple(lines["="]), tuple(lines["!"])))
            lines = {"?": [], "=": [], "!": []}
            continue
        if kind not in lines or line[1:2] != " " or not text.strip():
            raise ValueError(f"{path.name}:{number}: expected '? ', '= ', '! ' or '# ', found {line[:20]!r}")
        if kind != "!":
            parse(text)
        lines[kind].append(text)
    return tuple(entries)


@cache
def urn(*names: str) -> tuple[Entry, ...]:
    """The entries of these files, each as often as it has patterns: what is asked in many ways is asked often."""
    return tuple(entry for name in names for entry in load(name) for _ in entry.asks)


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def sentences(text: str) -> str:
    """The text with a capital where a sentence begins, whatever slot it began with."""
    return _SENTENCE.sub(lambda m: m[0].upper(), capitalised(text))


def question(draw: Draw, entries: Sequence[Entry], topic: str) -> list[Turn]:
    """One of the entries, asked and answered; the wording belongs to one split."""

    def make() -> tuple[Entry, str]:
        entry = draw.pick(entries)
        return entry, expand(draw, draw.pick(entry.asks))

    entry, asked = draw.held(make, lambda p: f"{topic}|{plain(p[1])}")
    said = expand(draw, draw.pick(entry.answers)).replace("\\n", "\n")
    return [user(typed(draw, [asked])), assistant(said, contains(entry.must, topic))]


def slotted(
    draw: Draw, entries: Sequence[Entry], topic: str, filling: Callable[[Draw, str], str]
) -> tuple[Entry, list[Turn]]:
    """One of the entries with its slots filled; the wording belongs to one split.

    `filling` gives something for the name of a slot. What the answer repeats isn't touched by the noise of typing.
    """

    def make() -> tuple[Entry, str, dict[str, str]]:
        entry = draw.pick(entries)
        form = expand(draw, draw.pick(entry.asks))
        slots: dict[str, str] = {}
        for name in SLOT.findall(form):
            value = filling(draw, name)
            while value in slots.values():
                value = filling(draw, name)
            slots.setdefault(name, value)
        return entry, form, slots

    entry, form, slots = draw.held(make, lambda p: f"{topic}|{plain(p[1].format_map(p[2]))}")
    answers = [expand(draw, answer) for answer in entry.answers]
    answer = draw.pick([a for a in answers if set(SLOT.findall(a)) <= set(slots)])
    kept = {name: slots[name] for name in SLOT.findall(answer)}
    asked = SLOT.sub(lambda m: m[0] if m[1] in kept else slots[m[1]], form)
    parts = SLOT.split(asked)
    worded = any(c.isalpha() for c in form.format_map(slots))
    prompt = typed(draw, parts, kept, courtesy=not form.startswith("{")) if worded else form.format_map(slots)
    said = answer.format_map(kept)
    must = tuple(m.format_map(slots) for m in entry.must)
    return entry, [user(prompt), assistant(sentences(said), contains(must, topic))]


def contains(must: Sequence[str], task: str) -> Check | None:
    """The check that all of `must` is said; none where nothing must be."""
    return Check("contains", {"all": list(must), "task": task}) if must else None
