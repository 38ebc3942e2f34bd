"""Facts told early and asked for later, with other talk in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import arithmetic, counting, glossary, rewriting, scope
from .conversation import Check, Conversation, Turn, assistant, system, user
from .draw import Draw
from .words import ANIMALS, COLORS, FOODS, HOBBIES, JOBS, WEEKDAYS, casual, city, code, first_name, full_name


@dataclass(frozen=True, slots=True)
class Fact:
    """Something the user tells: how to say it, how to ask it back, and the answer."""

    topic: str
    tell: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str
    value: Callable[[Draw], str]


FACTS = (
    Fact("name", ("My name is {v}.", "I am {v}.", "Call me {v}.", "Hello, I'm {v}."), ("What is my name?", "Do you remember my name?", "Who am I?", "What did I say my name was?"), "Your name is {v}.", first_name),
    Fact("city", ("I live in {v}.", "I moved to {v}.", "My home is in {v}."), ("Where do I live?", "Which city do I live in?", "What city is my home?"), "You live in {v}.", city),
    Fact("pet", ("I have a {v}.", "My pet is a {v}.", "At home I keep a {v}."), ("What pet do I have?", "Which animal do I keep?", "What kind of pet is mine?"), "You have a {v}.", lambda d: d.pick(ANIMALS)),
    Fact("color", ("My favorite color is {v}.", "I love the color {v}.", "The color I like best is {v}."), ("What is my favorite color?", "Which color do I like?", "What color do I like best?"), "Your favorite color is {v}.", lambda d: d.pick(COLORS)),
    Fact("food", ("My favorite food is {v}.", "I love to eat {v}.", "I could eat {v} every day."), ("What is my favorite food?", "What do I love to eat?", "Which food do I like?"), "Your favorite food is {v}.", lambda d: d.pick(FOODS)),
    Fact("job", ("I work as a {v}.", "I am a {v} by trade.", "My job is {v}."), ("What is my job?", "What do I work as?", "What do I do for a living?"), "You work as a {v}.", lambda d: d.pick(JOBS)),
    Fact("hobby", ("My hobby is {v}.", "On weekends I like {v}.", "I enjoy {v}."), ("What is my hobby?", "What do I like on weekends?", "What do I enjoy?"), "Your hobby is {v}.", lambda d: d.pick(HOBBIES)),
    Fact("age", ("I am {v} years old.", "I turned {v} this year.", "My age is {v}."), ("How old am I?", "What is my age?", "Do you know my age?"), "You are {v} years old.", lambda d: str(d.between(8, 90))),
    Fact("code", ("The door code is {v}.", "Remember this code: {v}.", "The code for today is {v}."), ("What is the door code?", "What was the code?", "Which code did I tell you?"), "The code is {v}.", code),
    Fact("friend", ("My best friend is {v}.", "My friend is called {v}.", "{v} is my best friend."), ("Who is my best friend?", "What is my friend called?", "What is the name of my friend?"), "Your best friend is {v}.", full_name),
    Fact("day", ("My appointment is on {v}.", "I see the dentist on {v}.", "The appointment is set for {v}."), ("When is my appointment?", "On which day is my appointment?", "What day do I see the dentist?"), "Your appointment is on {v}.", lambda d: d.pick(WEEKDAYS)),
    Fact("number", ("My lucky number is {v}.", "Remember the number {v}.", "The number to keep is {v}."), ("What is my lucky number?", "Which number did I tell you?", "What was the number?"), "The number is {v}.", lambda d: str(d.between(10, 9999))),
)  # fmt: skip
_ACKNOWLEDGE = (
    "Got it.",
    "I will remember that.",
    "Noted.",
    "Thanks for telling me.",
    "Okay.",
    "Good to know.",
)
_MISSING = "You have not told me that."
_DISTRACTORS: tuple[tuple[Callable[[Draw], list[Turn]], float], ...] = (
    (lambda draw: arithmetic.make(draw).turns, 0.25),
    (lambda draw: counting.make(draw).turns, 0.15),
    (lambda draw: rewriting.make(draw).turns, 0.2),
    (lambda draw: glossary.make(draw).turns, 0.25),
    (scope.refusal, 0.15),
)


def _facts(draw: Draw, low: int, high: int) -> tuple[list[Fact], list[str]]:
    """Facts on different topics, and what each is about this user; the combination belongs to one split."""

    def make() -> tuple[list[Fact], list[str]]:
        facts = draw.sample(FACTS, draw.between(low, high))
        return facts, [f.value(draw) for f in facts]

    return draw.held(
        make, lambda p: "recall:" + ",".join(sorted(f"{f.topic}={v}" for f, v in zip(*p, strict=True)))
    )


def _distract(draw: Draw) -> list[Turn]:
    return draw.weighted(_DISTRACTORS)(draw)


def _ask(draw: Draw, fact: Fact, value: str, distance: int) -> list[Turn]:
    said = fact.answer.format(v=value)
    check = Check("contains", {"all": [value], "task": f"after {min(distance, 6)} turns"})
    return [user(casual(draw, draw.pick(fact.ask))), assistant(said, check)]


def _told_by_turns(draw: Draw) -> list[Turn]:
    """Facts told one a turn, distractors, then questions; sometimes about what was never told."""
    facts, values = _facts(draw, 1, 4)
    turns: list[Turn] = []
    told_at: list[int] = []
    for fact, value in zip(facts, values, strict=True):
        told_at.append(len(turns))
        turns += [user(draw.pick(fact.tell).format(v=value)), assistant(draw.pick(_ACKNOWLEDGE))]
        if draw.chance(0.25):
            turns += _distract(draw)
    for _ in range(draw.weighted(((0, 0.25), (1, 0.35), (2, 0.25), (3, 0.15)))):
        turns += _distract(draw)
    order = draw.shuffled(range(len(facts)))
    for i in order[: draw.between(1, len(facts))]:
        turns += _ask(draw, facts[i], values[i], (len(turns) - told_at[i]) // 2 - 1)
    if draw.chance(0.15):
        unheard = draw.pick([f for f in FACTS if f not in facts])
        check = Check("contains", {"all": ["not told"], "task": "never told"})
        turns += [user(draw.pick(unheard.ask)), assistant(_MISSING, check)]
    return turns


def _told_at_once(draw: Draw) -> list[Turn]:
    """Several facts in one message or in the system prompt."""
    facts, values = _facts(draw, 2, 5)
    told = " ".join(draw.pick(f.tell).format(v=v) for f, v in zip(facts, values, strict=True))
    turns = [user(told), assistant(draw.pick(_ACKNOWLEDGE))]
    if draw.chance(0.3):
        turns = [system(f"What the user said before: {told}")]
    if draw.chance(0.4):
        turns += _distract(draw)
    asked = draw.between(1, len(facts))
    for i in draw.shuffled(range(len(facts)))[:asked]:
        turns += _ask(draw, facts[i], values[i], max((len(turns) - 2) // 2, 0))
    return turns


def _changed(draw: Draw) -> list[Turn]:
    """A fact that is corrected: the later word counts."""
    (fact,), (new,) = _facts(draw, 1, 1)
    old = fact.value(draw)
    while old == new:
        old = fact.value(draw)
    turns = [user(draw.pick(fact.tell).format(v=old)), assistant(draw.pick(_ACKNOWLEDGE))]
    if draw.chance(0.5):
        turns += _distract(draw)
    correction = draw.pick(("Sorry, I was wrong. {t}", "Correction: {t}", "That has changed. {t}"))
    turns += [
        user(correction.format(t=draw.pick(fact.tell).format(v=new))),
        assistant(draw.pick(_ACKNOWLEDGE)),
    ]
    return turns + _ask(draw, fact, new, 0)


def make(draw: Draw) -> Conversation:
    """One conversation that needs its own past."""
    kind = draw.weighted(((_told_by_turns, 0.55), (_told_at_once, 0.33), (_changed, 0.12)))
    return Conversation("recall", kind(draw))
