"""Plain sentences in their forms: present, past, future, negative, question."""

from __future__ import annotations

from dataclasses import dataclass

from .draw import Draw
from .tasks import pairs
from .words import ADJECTIVES, ANIMALS, JOBS, OBJECTS, PLACES, first_name

_SINGULAR = (
    "My sister",
    "My brother",
    "My friend",
    "Our neighbor",
    "The boy",
    "The girl",
    "He",
    "She",
    "My mother",
    "My uncle",
)
_PLURAL = (
    "I",
    "We",
    "They",
    "You",
    "The children",
    "My friends",
    "My parents",
    "Our neighbors",
    "Two men",
    "Many people",
)
# Things and how they can be.
_STATES = (
    ("soup tea water coffee", "cold hot warm ready good"), ("room kitchen garden house school", "clean dirty quiet small big empty"),
    ("door window shop bank", "open closed new old"), ("train bus ship plane", "late full empty new fast slow"),
    ("car phone bike clock lamp", "broken new old cheap"), ("bag box bottle", "full empty heavy light"),
    ("dog cat horse baby", "hungry tired happy small"), ("street park city", "safe quiet loud busy"),
)  # fmt: skip
_TIMES = ("every day", "in the morning", "on Sunday", "at night", "in summer", "after school")


@dataclass(frozen=True, slots=True)
class Clause:
    """Who does what. `forms` are base, with s, past of the verb; of "be" they are unused."""

    subject: str
    forms: tuple[str, ...]
    rest: str
    plural: bool = False

    @property
    def _is(self) -> bool:
        return self.forms[0] == "be"

    def _be(self, past: bool = False) -> str:
        if past:
            return "were" if self.plural else "was"
        return "are" if self.plural else "is"

    def present(self) -> str:
        verb = self._be() if self._is else self.forms[0 if self.plural else 1]
        return f"{self.subject} {verb} {self.rest}"

    def past(self) -> str:
        verb = self._be(past=True) if self._is else self.forms[2]
        return f"{self.subject} {verb} {self.rest}"

    def future(self) -> str:
        return f"{self.subject} will {self.forms[0]} {self.rest}"

    def negative(self) -> str:
        if self._is:
            return f"{self.subject} {self._be()} not {self.rest}"
        return f"{self.subject} {'do' if self.plural else 'does'} not {self.forms[0]} {self.rest}"

    def _subject(self) -> str:
        """The subject inside a sentence."""
        keep = self.subject == "I" or self._named
        return self.subject if keep else self.subject[0].lower() + self.subject[1:]

    def inner(self) -> str:
        """The sentence as the second part of another one."""
        return self._subject() + self.present()[len(self.subject) :]

    def question(self) -> str:
        subject = self._subject()
        if self._is:
            return f"{self._be().capitalize()} {subject} {self.rest}?"
        return f"{'Do' if self.plural else 'Does'} {subject} {self.forms[0]} {self.rest}?"

    @property
    def _named(self) -> bool:
        known = (*_SINGULAR, *_PLURAL)
        return self.subject not in known and not self.subject.startswith("The ")


def clause(draw: Draw) -> Clause:
    """A sentence of three to nine words."""
    if draw.chance(0.15):
        things, states = draw.pick(_STATES)
        return Clause(f"The {draw.pick(things.split())}", ("be",), draw.pick(states.split()))
    base, third, past, things = draw.pick(pairs("language", "verbs"))
    plural = draw.chance(0.4)
    if plural:
        subject = draw.pick(_PLURAL)
    elif draw.chance(0.5):
        subject = first_name(draw)
    elif draw.chance(0.5):
        subject = draw.pick(_SINGULAR)
    else:
        subject = f"The {draw.pick(ADJECTIVES)} {draw.pick(ANIMALS + JOBS)}"
    return Clause(subject, (base, third, past), draw.pick(things.split("|")), plural)


def sentence(draw: Draw) -> str:
    """A plain sentence of 3 to 12 words without its final mark."""
    at = draw.below(10)
    if at < 3:
        who = f"The {draw.pick(ADJECTIVES)} {draw.pick(ANIMALS)}"
        verb = draw.pick(("sees", "finds", "likes", "carries", "hides", "brings", "wants", "keeps"))
        where = draw.pick((f" in the {draw.pick(PLACES)}", f" near the {draw.pick(PLACES)}", ""))
        return f"{who} {verb} the {draw.pick(ADJECTIVES)} {draw.pick(OBJECTS)}{where}"
    made = clause(draw)
    text = draw.pick((made.present, made.present, made.past, made.future, made.negative))()
    return f"{text} {draw.pick(_TIMES)}" if draw.chance(0.2) else text
