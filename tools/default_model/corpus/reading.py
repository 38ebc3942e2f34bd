"""Short texts and questions about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .conversation import Check, Turn, assistant, system, user
from .draw import Draw
from .records import RECORDS, Field, clock, person_name
from .told import STATES
from .wording import ask, expand
from .words import (
    ADJECTIVES,
    ANIMALS,
    BOYS,
    FOODS,
    GIRLS,
    MONTHS,
    NAMES,
    OBJECTS,
    PLACES,
    WEEKDAYS,
    article,
    articled,
    city,
    first_name,
    listed,
    plural,
)

_ASKED = (
    "{text}\n\n{q}", "{text}\n\n{q}", "{text}\n{q}", "{text} {q}", "Text: {text}\n(Question: |){q}", "Read this[ text|]: {text}\n{q}", "{q}\n\n{text}", "{q} Text: {text}", "(Use|Look at|Here is|Take) this text: {text}\n{q}",
    "(Answer|Reply) from the text[ only|]. {text}\n{q}", "Context: {text}\n\nQuestion: {q}[\nAnswer:|]", "(Here is a story|A short story|I read this): {text} {q}", "Context: {text}\n{q}", "Based on this text: {text}\n{q}", "Passage: {text}\n\nQ: {q}[\nA:|]",
)  # fmt: skip
_GIVEN = (
    "(Read|Remember|Note) this[ text|]: {text}",
    "(Here is|This is|I have) a [short ]text: {text}",
    "{text}\n\nI will ask you about this.",
    "I will give you a text and then ask (you about it|questions). {text}",
    "Text: {text}",
)
_READ = (
    "I have read it. What would you like to know?",
    "Got it. What would you like to know?",
    "Okay, I have read it. Ask me about it.",
)
_SYSTEM = (
    "Answer from this text: {text}",
    "Use this text to answer: {text}",
    "You know only this: {text}",
    "Context: {text}",
    "Answer questions about this text. {text}",
)

# Verbs: past, base form, and what they act on.
_VERBS: tuple[tuple[str, str, list[str]], ...] = tuple(
    (verb.split()[0], verb.split()[1], things)
    for verbs, things in (
        ("bought buy|sold sell|lost lose|found find|broke break|fixed fix|cleaned clean|borrowed borrow|carried carry|hid hide|painted paint|drew draw|brought bring|wanted want|forgot forget|made make|washed wash|opened open", OBJECTS),
        ("bought buy|sold sell|ate eat|cooked cook|ordered order|brought bring|shared share|dropped drop|wanted want", FOODS),
        ("saw see|fed feed|followed follow|met meet|watched watch|washed wash|painted paint|found find|called call", ANIMALS),
    )
    for verb in verbs.split("|")
)  # fmt: skip


@dataclass(slots=True)
class Question:
    """Patterns of a question with their slots, and the answer; `must` is what a right one contains."""

    asks: tuple[str, ...]
    slots: dict[str, str]
    said: str
    must: str
    task: str


@dataclass(slots=True)
class Event:
    """Who did what to which thing, how many, where, when and with whom; empty strings are not said."""

    who: str
    past: str
    base: str
    noun: str
    count: int
    where: str
    when: str
    friend: str

    @property
    def thing(self) -> str:
        return _one(self.noun) if self.count == 1 else f"{self.count} {plural(self.noun)}"

    @property
    def the(self) -> str:
        return f"the {self.noun if self.count == 1 else plural(self.noun)}"

    def sentence(self, draw: Draw, subject: str) -> str:
        tail = [f"with {self.friend}" if self.friend else "", self.where]
        if self.when and draw.chance(0.35):
            start = self.when[0].upper() + self.when[1:]
            return (
                " ".join(
                    [
                        f"{start},",
                        subject
                        if subject in NAMES or " " in subject or subject not in {"She", "He"}
                        else subject.lower(),
                        self.past,
                        self.thing,
                        *[t for t in tail if t],
                    ]
                )
                + "."
            )
        return " ".join([subject, self.past, self.thing, *[t for t in (*tail, self.when) if t]]) + "."


_UNCOUNTED = {
    "bread",
    "cheese",
    "soup",
    "rice",
    "honey",
    "butter",
    "pasta",
    "salad",
    "milk",
    "corn",
    "garlic",
    "pepper",
    "fish",
    "spinach",
}
_ON = {"island", "hill", "beach", "mountain", "bridge", "farm"}


def _one(noun: str) -> str:
    return f"some {noun}" if noun in _UNCOUNTED else article(noun)


def _in(place: str) -> str:
    return f"{'on' if place in _ON else 'near' if place == 'river' else 'in'} the {place}"


def _when(draw: Draw) -> str:
    return draw.pick(
        (
            f"on {draw.pick(WEEKDAYS)}",
            f"at {clock(draw)}",
            f"in {draw.pick(MONTHS)}",
            f"in {draw.between(1950, 2024)}",
            "in the morning",
            "in the evening",
            "yesterday",
        )
    )


def _where(draw: Draw) -> str:
    return draw.pick(
        (
            _in(draw.pick(PLACES)),
            _in(draw.pick(PLACES)),
            f"near the {draw.pick(PLACES)}",
            f"in {city(draw)}",
        )
    )


def _event(draw: Draw, who: str) -> Event:
    past, base, things = draw.pick(_VERBS)
    count = 1 if draw.chance(0.65) else draw.between(2, 12)
    where = _where(draw) if draw.chance(0.65) else ""
    when = _when(draw) if draw.chance(0.55) else ""
    friend = first_name(draw) if draw.chance(0.18) else ""
    return Event(who, past, base, draw.pick(things), count, where, when, friend if friend != who else "")


def _events(draw: Draw) -> tuple[str, list[Question]]:
    """What one to three people did; sometimes one of them did two things."""

    def make() -> list[Event]:
        people = draw.sample(NAMES, draw.between(1, 3))
        if draw.chance(0.2):
            people[0] = person_name(draw)
        made = [_event(draw, who) for who in people]
        if draw.chance(0.4):
            made.insert(1, _event(draw, made[0].who))
        return made

    def key(made: list[Event]) -> str:
        return "events:" + "|".join(f"{e.who} {e.past} {e.thing}" for e in made)

    events = draw.held(make, key)
    if len({e.noun for e in events}) < len(events) or len({(e.who, e.past) for e in events}) < len(events):
        events = events[:1]
    lines, last = [], ""
    for event in events:
        subject = event.who
        if event.who == last:
            first = last.split(" ", maxsplit=1)[0]
            subject = "She" if first in GIRLS else "He" if first in BOYS else event.who
        lines.append(event.sentence(draw, subject))
        last = event.who
    return " ".join(lines), [q for e in events for q in _about_event(draw, e, events)]


_WHO = (
    "Who {past} {the}?",
    "Who {past} {thing}?",
    "Which person {past} {the}?",
    "Who was it that {past} {the}?",
)
_WHAT = ("What did {who} {base}?", "What was it that {who} {past}?", "(Tell me|Say) what {who} {past}.")
_HOW_MANY = (
    "How many {nouns} did {who} {base}?",
    "How many {nouns} were there?",
    "What was the number of {nouns}?",
)
_CIRCUMSTANCES = {
    "where": ("Where did {who} {base} {the}?", "Where was it that {who} {past} {the}?", "In (which|what) place did {who} {base} {the}?"),
    "when": ("When did {who} {base} {the}?", "(On which day|At what time|When) was it that {who} {past} {the}?"),
    "with whom": ("With whom did {who} {base} {the}?", "Who was with {who}?", "Who did {who} {base} {the} with?"),
}  # fmt: skip
_DID = ("Did {who} {base} {x}?", "Is it true that {who} {past} {x}?")
_STRANGER = ("What did {who} (do|{base})?", "Who is {who}?", "Where is {who}?")


def _about_event(draw: Draw, e: Event, events: list[Event]) -> list[Question]:
    nouns = plural(e.noun)
    slots = {"who": e.who, "past": e.past, "base": e.base, "the": e.the, "nouns": nouns, "thing": e.thing}
    did = f"{e.who} {e.past}"
    what = e.noun if e.count == 1 else nouns
    asked = [
        Question(_WHO, slots, f"{did} {e.the}.", e.who, "text: who"),
        Question(_WHAT, slots, f"{did} {e.thing}.", what, "text: what"),
    ]
    answers = {"where": e.where, "when": e.when, "with whom": f"with {e.friend}" if e.friend else ""}
    for name, answer in answers.items():
        asks = _CIRCUMSTANCES[name]
        if answer:
            asked.append(Question(asks, slots, f"{did} {e.the} {answer}.", answer, f"text: {name}"))
        elif draw.chance(0.3):
            asked.append(_absent(asks[:1], slots, f"The text does not say {name}."))
    if e.count > 1:
        asked.append(Question(_HOW_MANY, slots, f"{did} {e.thing}.", str(e.count), "text: how many"))
    pool = ANIMALS if e.noun in ANIMALS else OBJECTS if e.noun in OBJECTS else FOODS
    other = _one(draw.pick([n for n in pool if n not in {x.noun for x in events}]))
    x, yes = draw.pick(((e.thing, "Yes"), (other, "No")))
    asked.append(Question(_DID, {**slots, "x": x}, f"{yes}, {did} {e.thing}.", f"{yes},", "text: yes or no"))
    if draw.chance(0.3):
        present = {x.who for x in events} | {x.friend for x in events}
        stranger = draw.pick([n for n in NAMES if n not in present])
        asked.append(
            _absent(_STRANGER, {**slots, "who": stranger}, f"The text says nothing about {stranger}.")
        )
    return asked


def _absent(asks: tuple[str, ...], slots: dict[str, str], said: str) -> Question:
    must = next(m for m in ("does not say", "nothing about", "There is no ") if m in said)
    return Question(asks, slots, said, must, "text: not in it")


def _states(draw: Draw) -> tuple[str, list[Question]]:
    """Two to four facts about one or two people."""
    people = draw.sample(NAMES, draw.between(1, 2))
    if draw.chance(0.2):
        people[0] = first_name(draw)
    chosen = draw.sample(STATES, draw.between(2, 4))
    owners = [draw.pick(people) for _ in chosen]
    values = draw.held(
        lambda: [s.value(draw) for s in chosen],
        lambda v: (
            "states:" + ",".join(f"{n} {s.topic}={x}" for n, s, x in zip(owners, chosen, v, strict=True))
        ),
    )
    lines, asked, last = [], [], ""
    for who, state, value in zip(owners, chosen, values, strict=True):
        line = articled(expand(draw, draw.pick(state.say)).replace("{v}", value))
        pronoun = "She" if who in GIRLS else "He" if who in BOYS else who
        other = {"She": "Her", "He": "His"}.get(pronoun, f"{who}'s")
        same = who == last and pronoun != who
        lines.append(
            line.replace("{n}'s", other).replace("{n}", pronoun) if same else line.replace("{n}", who)
        )
        said = state.answer.replace("{n}", who).replace("{v}", value)
        asked.append(Question(state.ask, {"n": who}, said, value, f"text: {state.topic}"))
        last = who
    absent = draw.pick([s for s in STATES if s not in chosen])
    if draw.chance(0.35):
        asked.append(_absent(absent.ask, {"n": people[0]}, "The text does not say that."))
    if draw.chance(0.25):
        said = listed(list(dict.fromkeys(owners)))
        asked.append(
            Question(
                (
                    "Who is (in the text|this about|the text about|mentioned)?",
                    "(Which|What) people are in the text?",
                ),
                {},
                f"The text is about {said}.",
                said,
                "text: who",
            )
        )
    return ". ".join(lines) + ".", asked


def _spoken(field: Field) -> str:
    """The name of a fact as a question says it."""
    key = next(k for k in field.keys if k not in {"sku", "ceo", "from", "to", "on"}).replace("_", " ")
    return f"number of {key}" if key.endswith("s") and field.schema["type"] == "integer" else key


def _record(draw: Draw) -> tuple[str, list[Question]]:
    """A paragraph about a thing, asked by the names of its facts."""
    record = draw.pick(RECORDS[2:])
    plain = [f for f in record.fields if f.schema["type"] in {"string", "integer", "number"}]
    fields = draw.sample(plain, draw.between(2, 3))
    values = draw.held(
        lambda: {id(f): f.value(draw) for f in (record.name, *fields)},
        lambda v: f"reading:{record.kind}:" + ",".join(map(str, v.values())),
    )
    asked = []
    patterns = (
        "(What is|What's|Tell me|Give me|Find) the {key}?",
        "(What is|What's) the {key} (here|in the text|of this {kind}|of the {kind})?",
        "{key}?",
        "Do you know the {key}?",
        "What does the text say about the {key}?",
    )
    for f in fields:
        key, value = _spoken(f), str(values[id(f)])
        asked.append(
            Question(
                patterns,
                {"key": key, "kind": record.kind},
                f"The {key} is {value}.",
                value,
                "text: fact of a thing",
            )
        )
    absent = _spoken(draw.pick([f for f in plain if f not in fields]))
    if draw.chance(0.4):
        said = f"The text does not say what the {absent} is."
        asked.append(_absent(patterns[:2], {"key": absent, "kind": record.kind}, said))
    return record.paragraph(draw, values, fields), asked


def _prices(draw: Draw) -> tuple[str, list[Question]]:
    """A small list of prices, counts or owners."""
    form = draw.pick(("price", "count", "owner"))
    things = draw.sample(FOODS + OBJECTS, draw.between(2, 4))

    def value() -> str:
        return draw.pick(NAMES) if form == "owner" else str(draw.between(1, 90))

    values = draw.held(
        lambda: [value() for _ in things], lambda v: f"prices:{form}:{list(zip(things, v, strict=True))}"
    )
    head, between, sign = draw.pick(
        (("", ", ", ": "), ("", "\n", ": "), ("", ", ", " "), ("| ", " |\n| ", " | "))
    )
    title = {"price": "Prices in dollars", "count": "In stock", "owner": "Who brings what"}[form]
    text = (
        f"{title}:\n"
        + head
        + between.join(f"{t}{sign}{v}" for t, v in zip(things, values, strict=True))
        + (" |" if head else "")
    )
    asks = {
        "price": (
            "(How much is|What is the price of|What does it cost to buy) the {x}?",
            "{x} price?",
            "How much does the {x} cost?",
        ),
        "count": ("How many {xs} are (there|in stock)?", "How many {xs} do we have?", "{xs}?"),
        "owner": (
            "Who brings the {x}?",
            "(Which person|Who) has to bring the {x}?",
            "Who is responsible for the {x}?",
        ),
    }[form]
    answers = {
        "price": "The {x} costs {v} dollars.",
        "count": "The number of {xs} is {v}.",
        "owner": "{v} brings the {x}.",
    }
    asked = [
        Question(
            asks, {"x": t, "xs": plural(t)}, answers[form].format(x=t, xs=plural(t), v=v), v, "text: table"
        )
        for t, v in zip(things, values, strict=True)
    ]
    other = draw.pick([t for t in FOODS + OBJECTS if t not in things])
    if draw.chance(0.4):
        asked.append(
            _absent(asks[:1], {"x": other, "xs": plural(other)}, f"There is no {other} in the list.")
        )
    return text, asked


_WHERE = ("Where is the {t}?", "Where (can I|do you) find the {t}?", "In which place is the {t}?")
_LOOK = (
    "(What|How) is the {t}[ like|]?",
    "How does the {t} look?",
    "What does the {t} look like?",
    "What kind of {t} is (it|there)?",
)


def _scene(draw: Draw) -> tuple[str, list[Question]]:
    """A thing with its look and its place, among others."""
    things = draw.sample(OBJECTS, draw.between(2, 3))
    looks = draw.sample(ADJECTIVES, len(things))
    places = draw.held(
        lambda: draw.sample(PLACES, len(things)),
        lambda p: f"scene:{list(zip(looks, things, p, strict=True))}",
    )
    where = [f"near the {p}" if draw.chance(0.3) else _in(p) for p in places]
    lines, asked = [], []
    for look, t, at in zip(looks, things, where, strict=True):
        seen = article(f"{look} {t}")
        line = draw.pick(
            (f"The {look} {t} (is|stands|lies) {at}.", f"There is {seen} {at}.", f"You can see {seen} {at}.")
        )
        lines.append(expand(draw, line))
        slots = {"t": t, "at": at}
        asked += [
            Question(_WHERE, slots, f"The {t} is {at}.", at, "text: where"),
            Question(
                ("(What is|What's) {at}?", "What can you (see|find) {at}?"),
                slots,
                f"The {look} {t} is {at}.",
                t,
                "text: what",
            ),
            Question(_LOOK, slots, f"The {t} is {look}.", look, "text: what"),
        ]
    slots = {"t": draw.pick([t for t in OBJECTS if t not in things])}
    asked.append(_absent(_WHERE[:1], slots, "The text does not say that."))
    return " ".join(lines), asked


_TEXTS: tuple[tuple[Callable[[Draw], tuple[str, list[Question]]], float], ...] = (
    (_events, 0.42), (_states, 0.22), (_record, 0.14), (_prices, 0.12), (_scene, 0.1),
)  # fmt: skip


def make(draw: Draw) -> list[Turn]:
    """A text and one to three questions about it."""
    text, questions = draw.weighted(_TEXTS)(draw)
    count = min(len(questions), draw.weighted(((1, 0.55), (2, 0.3), (3, 0.15))))
    chosen = draw.sample(questions, count)
    form = draw.weighted((("together", 0.62), ("before", 0.24), ("system", 0.14)))
    turns: list[Turn] = []
    if form == "system":
        turns.append(system(draw.pick(_SYSTEM).format(text=text)))
    elif form == "before":
        turns += [user(ask(draw, _GIVEN, {"text": text})), assistant(draw.pick(_READ))]
    for i, q in enumerate(chosen):
        pattern = draw.pick(q.asks)
        asked = draw.pick(_ASKED).replace("{q}", pattern) if form == "together" and i == 0 else pattern
        check = Check("contains", {"all": [q.must], "task": q.task})
        turns += [user(ask(draw, asked, {"text": text}, **q.slots)), assistant(q.said, check)]
    return turns
