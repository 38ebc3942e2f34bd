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
_STATES = [
    "cold",
    "warm",
    "new",
    "old",
    "broken",
    "clean",
    "dirty",
    "open",
    "closed",
    "full",
    "empty",
    "ready",
    "late",
    "free",
    "busy",
    "safe",
    "quiet",
    "loud",
    "small",
    "big",
]
_THINGS = [
    "soup",
    "tea",
    "room",
    "door",
    "shop",
    "train",
    "house",
    "window",
    "water",
    "car",
    "kitchen",
    "garden",
    "phone",
    "street",
    "school",
    "bus",
    "coffee",
    "bed",
    "bag",
]
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

    def question(self) -> str:
        subject = (
            self.subject if self.subject == "I" or self._named else self.subject[0].lower() + self.subject[1:]
        )
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
        return Clause(f"The {draw.pick(_THINGS)}", ("be",), draw.pick(_STATES))
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
