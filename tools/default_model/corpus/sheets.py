"""Subjects (terms, options, metrics, …) and the kinds of questions about them, written by hand in text files.

    : 3 option for a wish
    ? (Which|What) option (can|lets me) {wish}[?]
    + and how do I {wish}[?]
    = Use *{name}*. It {does}.

    @ --memory | memory bound
    does sets a hard bound on the *memory* of all processes
    wish limit memory | (cap|bound) the memory

A kind has a weight, patterns of its questions ("?"), patterns for a subject that is already being talked about ("+"), and
answers ("="). A subject has names and fields; "@+" marks one that is asked about four times as often. A field with
several lines has several values; wishes are patterns, divided by " | ". Of a kind's answers those with the most fields that the subject has
are used; what stands between asterisks must be in a right answer. Slots of questions: `t` any name, `b` the same without
its article, `k` the first name, copied exactly, `u` its words without dashes, `is` and `do` in its number, and fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from .conversation import Check, Turn, assistant, user
from .draw import Draw
from .wording import expand, parse, plain, tidy, typed

_FOLDER = Path(__file__).with_name("sheets")
_SLOT = re.compile(r"\{(\w+)\}")
_MARK = re.compile(r"\*([^*]+)\*")
_NAMES = {"t", "b", "k", "u", "is", "do", "name", "env", "plain"}
_OFTEN = 4
_SINGULAR = ("ss", "us", "is", "experts", "bias", "TPS", "RPS", "FLOPS", "ALiBi")


@dataclass(slots=True)
class Kind:
    """A kind of question: how often it is asked, its patterns and its answers."""

    name: str
    weight: float
    asks: list[str] = field(default_factory=list)
    follows: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Subject:
    """What questions are about."""

    names: tuple[str, ...]
    often: bool
    fields: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sheet:
    """Kinds and subjects. `urn` holds frequent subjects several times."""

    kinds: tuple[Kind, ...]
    subjects: tuple[Subject, ...]
    urn: tuple[Subject, ...]

    def kind(self, name: str) -> Kind:
        return next(k for k in self.kinds if k.name == name)


@cache
def load(*files: str) -> Sheet:
    """The files read as one sheet. Raises ValueError with the line where one cannot be read."""
    kinds: list[Kind] = []
    subjects: list[Subject] = []
    for name in files:
        path = _FOLDER / f"{name}.txt"
        in_kind = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line or line.startswith("#"):
                continue
            try:
                in_kind = _read(line, kinds, subjects, in_kind=in_kind)
            except (ValueError, IndexError) as error:
                raise ValueError(f"{path.name}:{number}: {error} in {line[:40]!r}") from error
    return Sheet(
        tuple(kinds), tuple(subjects), tuple(s for s in subjects for _ in range(_OFTEN if s.often else 1))
    )


def _read(line: str, kinds: list[Kind], subjects: list[Subject], *, in_kind: bool) -> bool:
    """Take one line; whether the lines after it belong to a kind."""
    head, _, text = line.partition(" ")
    if not text:
        raise ValueError("a line needs a text")
    if head == ":":
        weight, _, name = text.partition(" ")
        kinds.append(Kind(name, float(weight)))
        return True
    if head in {"@", "@+"}:
        subjects.append(Subject(tuple(text.split(" | ")), head == "@+"))
        return False
    if in_kind:
        parse(text)
        {"?": kinds[-1].asks, "+": kinds[-1].follows, "=": kinds[-1].answers}[head].append(text)
    else:
        values = text.split(" | ") if head == "wish" else [text]
        if head == "wish":
            parse(text)
        subjects[-1].fields.setdefault(head, []).extend(values)
    return in_kind


def _slots(text: str) -> set[str]:
    return set(_SLOT.findall(text)) - _NAMES


def fits(kind: Kind, subject: Subject) -> bool:
    """Whether the subject has the fields of a question and of an answer of this kind."""
    asked = set().union(*map(_slots, kind.asks))
    return asked <= subject.fields.keys() and any(_slots(a) <= subject.fields.keys() for a in kind.answers)


def _named(draw: Draw, subject: Subject) -> dict[str, str]:
    """Values of the slots that every subject has."""
    first, name = subject.names[0], draw.pick(subject.names)
    bare = re.sub(r"^(the|an?) ", "", name)
    plural = bare.endswith("s") and not bare.endswith(_SINGULAR)
    words = re.sub(r"[-_]+", " ", first.removeprefix("--")).strip()
    return {
        "t": name, "b": bare, "k": first, "u": words, "name": first, "plain": re.sub(r"^(the|an?) ", "", first),
        "is": "are" if plural else "is", "do": "do" if plural else "does", "env": "QUIRE_" + words.replace(" ", "_").upper(),
    }  # fmt: skip


def _fields(draw: Draw, subject: Subject) -> dict[str, str]:
    picked = {key: draw.pick(values) for key, values in subject.fields.items()}
    return {key: expand(draw, value) if key == "wish" else value for key, value in picked.items()}


def compose(draw: Draw, kind: Kind, subject: Subject) -> tuple[str, list[str]]:
    """An answer of this kind, and what a right answer contains."""
    having = [a for a in kind.answers if _slots(a) <= subject.fields.keys()]
    most = max(len(_slots(a)) for a in having)
    answer = draw.pick([a for a in having if len(_slots(a)) == most])
    text = expand(draw, answer).format_map({**_fields(draw, subject), **_named(draw, subject)})
    return _MARK.sub(r"\1", text).replace("\\n", "\n"), _MARK.findall(text)


def _asked(draw: Draw, pattern: str, values: Mapping[str, str]) -> str:
    """A form of the pattern with all slots filled but `k`."""
    text = expand(draw, pattern).format_map({**values, "k": "{k}"})
    return tidy(_MARK.sub(r"\1", text))


def ask(draw: Draw, topic: str, kind: Kind, subject: Subject, patterns: Sequence[str]) -> list[Turn]:
    """The question, asked and answered; subject and wording together belong to one split."""

    def make() -> tuple[str, str]:
        values = {**_fields(draw, subject), **_named(draw, subject)}
        return _asked(draw, draw.pick(patterns), values), values["k"]

    form, first = draw.held(make, lambda p: f"{topic}|{subject.names[0]}|{plain(p[0].replace('{k}', p[1]))}")
    parts = [p for text in form.split("{k}") for p in ("k", text)][1:]
    said, must = compose(draw, kind, subject)
    check = Check("contains", {"all": must, "task": kind.name}) if must else None
    return [user(typed(draw, parts, {"k": first})), assistant(said, check)]


def questions(draw: Draw, topic: str, sheet: Sheet, only: str = "") -> list[Turn]:
    """A question about one of the subjects (of the kind `only`), now and then with another about the same."""
    subject = draw.pick(sheet.urn)
    kinds = [(k, k.weight) for k in sheet.kinds if k.asks and fits(k, subject)]
    kind = sheet.kind(only) if only else draw.weighted(kinds)
    turns = ask(draw, topic, kind, subject, kind.asks)
    more = [k for k in sheet.kinds if k.follows and k is not kind and fits(k, subject)]
    if more and draw.chance(0.12):
        kind = draw.pick(more)
        turns += ask(draw, topic, kind, subject, kind.follows)
    return turns


def text(draw: Draw, sheet: Sheet, titles: Sequence[str]) -> str:
    """A plain text of notes about a few subjects."""
    note = sheet.kind("note")
    known = [s for s in sheet.subjects if fits(note, s)]
    about = draw.held(
        lambda: draw.sample(known, draw.between(1, 4)), lambda a: "note|" + "|".join(s.names[0] for s in a)
    )
    notes = [compose(draw, note, s)[0] for s in about]
    title = f"{draw.pick(titles)}\n\n" if draw.chance(0.2) else ""
    return title + draw.pick((" ", "\n", "\n\n")).join(notes)
