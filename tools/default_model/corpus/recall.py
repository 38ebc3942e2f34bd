"""Facts told early and asked for later, with other talk in between; lists kept; short texts and questions about them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from . import reading
from .conversation import Check, Conversation, Turn, assistant, system, user
from .draw import Draw
from .others import aside
from .told import FACTS, STATES, THING_VALUES, THINGS, Fact
from .wording import ask, expand, word
from .words import FOODS, NAMES, OBJECTS, ORDINALS, article, first_name, listed

_ACKNOWLEDGE = (
    "Got it.",
    "I will remember that.",
    "Noted.",
    "Thanks for telling me.",
    "Okay.",
    "Good to know.",
)
_KEEP = (
    "",
    "",
    "",
    "",
    " (Remember|Keep|Don't forget) that[, please|].",
    " (Can|Could) you remember that?",
    " I will ask you[ about it|] later.",
)
_PREFIX = (
    "[Please |](remember|note|keep in mind|don't forget) that ",
    "By the way, ",
    "FYI, ",
    "(Just so you know|You should know|For later), ",
    "I want you to (know|remember) that ",
    "(Fun fact|Note|Info): ",
)
# Whether the answer agrees: topic of a fact, and the question with a value {x} that may be wrong.
_IS_IT = {
    "name": ("Is my name {x}?", "Am I {x}?", "Am I called {x}?", "My name is {x}, right?"), "city": ("Do I live in {x}?", "Am I from {x}?", "I live in {x}, right?"), "color": ("Is my favorite color {x}?", "Do I like {x}[ best| most|]?"),
    "food": ("Is my favorite food {x}?", "Do I like {x}[ best| most|]?"), "age": ("Am I {x}[ years old|]?", "I am {x}, right?"), "code": ("Is the code {x}?", "The code is {x}, right?"), "number": ("Is the number {x}?", "Was it {x}?"),
    "word": ("Is the word {x}?", "Was the word {x}?"), "friend": ("Is {x} my best friend?", "Is my best friend {x}?"), "drink": ("Is my favorite drink {x}?", "Do I like {x}[ best| most|]?"), "hobby": ("Is my hobby {x}?", "Do I enjoy {x}?"),
    "pet name": ("Is my pet called {x}?", "Is {x} my pet?"), "meeting": ("Is the meeting at {x}?", "Does the meeting start at {x}?"), "appointment": ("Is my appointment on {x}?", "Do I see the dentist on {x}?"),
}  # fmt: skip
# How a fact called "your …" or "the name of your …" is asked for in few words.
_MINE = "[And |Now |And what about |What about |How about |Tell me ](my {x}|my {x} again|my {x}, please)[?]"
_YOURS = re.compile(r"(?:the name of )?your ((?:favorite )?\w+)$")
_MISSING = ("You have not told me {x}[ yet|].", "I don't know {x}. You have not told me.")
_CORRECTION = (
    "(Sorry|Actually|Wait|No|Oops|Correction|I was wrong|Hold on)[,|:] it's {v}[, not {old}|].", "(Actually|No, sorry|Sorry, I meant|I meant|Correction:|Wait, I mean|No,) {v}.", "(That was wrong|I made a mistake|I lied), it is {v}.",
    "(That has changed|It changed|Change that|Update): it is {v} now.", "Not {old}, {v}.", "Forget {old}, it's {v}.", "It's not {old} but {v}.", "No, not {old}. {v}!",
)  # fmt: skip
_ABOUT = (
    "What (did I (say|tell you)|have I (said|told you)) about (my|the) {x}?", "What do you know about my {x}?", "What about my {x}?", "(Tell me|Say|Repeat) what I (said|told you) about my {x}.", "What was it with my {x}[ again|]?", "Do you remember what I said about my {x}?",
)  # fmt: skip
_SUMMARY = (
    "What do you know about me?", "What (did|have) I (tell|told) you[ about me| about myself| so far|]?", "(Tell|Repeat|Sum up|Say) (me |)what I told you[ about me|].", "(Summarize|Sum up|List) what you know about me.", "What have you learned about me?", "Who am I and what do you know?", "(Say|Tell me) everything you know about me.",
    "What do you remember about me?", "What do you remember?",
)  # fmt: skip
_SYSTEM = (
    "What the user said before: {told}",
    "The user told you: {told}",
    "Notes about the user: {told}",
    "Remember what the user says of himself: {told}",
    "Earlier the user wrote: {told}",
)
_LIST = (
    "(My|Here is my|This is my) {kind}: {items}[.|]", "(Remember|Keep|Note|Save) (this|my) {kind}: {items}[.|]", "On my {kind} (are|I have) {items}.", "I have a {kind}: {items}", "My {kind} has {items}.", "{kind}: {items}",
)  # fmt: skip
_LIST_KINDS = ("list", "shopping list", "to-do list", "packing list", "wish list", "gift list")
_NTH = (
    "(What is|What's|Tell me|Which is) the {nth} (item|thing|one)[ on (my|the) list|]?",
    "(Which|What) (item|thing) is {nth}?",
    "(Give|Tell) me item (number |){nth}.",
    "What comes {nth}[ on my list|]?",
    "the {nth} (item|one|thing)?",
)
_COUNT = (
    "How many (items|things) (are|do I have) on (my|the) list?",
    "How (long|many) is my list?",
    "Count (my list|the items|what is on my list).",
    "How many items are there?",
)
_SHOW = (
    "(Show|Read|Tell|Give) me my list.",
    "What is on my list?",
    "(What's|What was|What is) on the list[ now| again|]?",
    "(Repeat|Print|Read|Say) (my|the) list.",
    "my list please",
)
_HAS = (
    "Is {x} on my list?",
    "Do I have {x} on (my|the) list?",
    "Did I put {x} on (my|the) list?",
    "Is there {x} on it?",
)
_ADD = (
    "(Add|Put|Write|Also add|Please add) {x} (to|on) (it|my list|the list).",
    "Add {x}[, please|].",
    "And {x}.",
    "I also need {x}.",
    "I forgot {x}.",
)
_DROP = (
    "(Remove|Delete|Take|Cross|Drop) {x} (from|off) (it|my list|the list).",
    "(Remove|Delete|Drop) {x}[, please|].",
    "I don't need {x}[ anymore|].",
    "I already have {x}, take it off.",
)
_SHORT = 260  # characters of talk in between


def _values(draw: Draw, low: int, high: int) -> tuple[list[Fact], list[str]]:
    """Facts on different topics, and what each is about this user; the combination belongs to one split."""

    def make() -> tuple[list[Fact], list[str]]:
        count = draw.between(low, high)
        facts = draw.sample(FACTS, count)
        if draw.chance(0.3) and all(f.topic != "name" for f in facts):
            facts[0] = FACTS[0]
        values = [f.value(draw) for f in facts]
        return facts, [v.lower() if draw.chance(0.06) else v for v in values]

    return draw.held(
        make, lambda p: "recall:" + ",".join(sorted(f"{f.topic}={v}" for f, v in zip(*p, strict=True)))
    )


def _said(fact: Fact, value: str) -> str:
    return fact.answer.format(v=value, av=article(value))


def _numbered(pattern: str, value: str, i: int) -> str:
    """The pattern with its slot numbered, and "an" before a vowel."""
    return _with_article(pattern, value).replace("{v}", f"{{v{i}}}")


def _with_article(pattern: str, value: str) -> str:
    return pattern.replace(" a {v}", f" {article(value).split(' ', maxsplit=1)[0]} {{v}}")


def _tell(draw: Draw, fact: Fact, value: str, told: str = "") -> list[Turn]:
    """The user says it; the answer takes note, now and then in the words of the fact."""
    pattern = told or draw.pick(fact.tell) + draw.pick(_KEEP)
    if not told and pattern.startswith(("My ", "I ", "The ")) and draw.chance(0.1):
        pattern = draw.pick(_PREFIX) + (
            pattern if pattern.startswith("I ") else pattern[0].lower() + pattern[1:]
        )
    pattern = _with_article(pattern, value)
    text = ask(draw, pattern, {"v": value})
    if fact.acknowledge and not told:
        reply = draw.pick(fact.acknowledge).format(v=value)
    elif draw.chance(0.45):
        said = _said(fact, value)
        reply = draw.pick(("Got it, ", "Okay, ", "Noted: ")) + said[0].lower() + said[1:]
    else:
        reply = draw.pick(_ACKNOWLEDGE)
    return [user(text), assistant(reply)]


def _aside(draw: Draw) -> list[Turn]:
    """Talk in between that says nothing of the user."""
    turns = aside(draw, r"\bmy\b|\bme\b|\bi\b|\bi'?m\b|called|remember", _SHORT)
    return [replace(t, check=None) for t in turns]


def _between(draw: Draw, most: int) -> list[Turn]:
    turns: list[Turn] = []
    for _ in range(
        min(most, draw.weighted(((0, 0.34), (1, 0.32), (2, 0.17), (3, 0.09), (4, 0.05), (6, 0.03))))
    ):
        turns += _aside(draw)
    return turns


def _asked(draw: Draw, fact: Fact, value: str, distance: int) -> list[Turn]:
    check = Check("contains", {"all": [value], "task": f"after {min(distance, 6)} turns"})
    short = _YOURS.match(fact.thing)
    asks = (_MINE.replace("{x}", short[1]),) if short and draw.chance(0.25) else fact.ask
    return [user(ask(draw, asks)), assistant(_said(fact, value), check)]


def _never_told(draw: Draw, told: Sequence[Fact]) -> list[Turn]:
    unheard = draw.pick([f for f in FACTS if f not in told])
    check = Check("contains", {"all": ["not told me"], "task": "never told"})
    return [user(ask(draw, unheard.ask)), assistant(word(draw, _MISSING, x=unheard.thing), check)]


def _confirmed(draw: Draw, fact: Fact, value: str) -> list[Turn]:
    """Whether it was this value: yes or no, and the fact again."""
    said = _said(fact, value)
    x = value if draw.chance(0.5) else fact.value(draw)
    yes = "Yes" if x == value else "No"
    check = Check("contains", {"all": [f"{yes},", value], "task": "yes or no about what was told"})
    return [
        user(ask(draw, _IS_IT[fact.topic], {"x": x})),
        assistant(f"{yes}, {said[0].lower()}{said[1:]}", check),
    ]


def _by_turns(draw: Draw) -> list[Turn]:
    """Facts told one a turn, other talk, then questions; sometimes about what was never told."""
    facts, values = _values(draw, 1, 3)
    turns: list[Turn] = []
    told_at: list[int] = []
    for fact, value in zip(facts, values, strict=True):
        told_at.append(len(turns))
        turns += _tell(draw, fact, value)
    turns += _between(draw, 6)
    if len(facts) > 1 and draw.chance(0.2):
        return turns + _summed(draw, facts, values)
    order = draw.shuffled(range(len(facts)))
    for i in order[: draw.between(1, len(facts))]:
        if facts[i].topic in _IS_IT and draw.chance(0.15):
            turns += _confirmed(draw, facts[i], values[i])
        else:
            turns += _asked(draw, facts[i], values[i], (len(turns) - told_at[i]) // 2 - 1)
    if draw.chance(0.15):
        turns += _never_told(draw, facts)
    return turns


def _summed(draw: Draw, facts: Sequence[Fact], values: Sequence[str]) -> list[Turn]:
    """All that was told, in its order."""
    parts = [_said(f, v).rstrip(".") for f, v in zip(facts, values, strict=True)]
    said = listed([parts[0], *[p[0].lower() + p[1:] for p in parts[1:]]]) + "."
    check = Check("contains", {"all": list(values), "task": "all that was told"})
    return [user(ask(draw, _SUMMARY)), assistant(said, check)]


def _at_once(draw: Draw) -> list[Turn]:
    """Several facts in one message or in the system prompt."""
    facts, values = _values(draw, 2, 4)
    patterns = [draw.pick(f.tell) for f in facts]
    kept = {f"v{i}": v for i, v in enumerate(values)}
    text = " ".join(_numbered(p, v, i) for i, (p, v) in enumerate(zip(patterns, values, strict=True)))
    if draw.chance(0.25):
        turns = [system(draw.pick(_SYSTEM).format(told=expand(draw, text).format_map(kept)))]
    else:
        turns = [user(ask(draw, text, kept)), assistant(draw.pick(_ACKNOWLEDGE))]
    told = len(turns)
    turns += _between(draw, 2)
    if draw.chance(0.25):
        return turns + _summed(draw, facts, values)
    for i in draw.shuffled(range(len(facts)))[: draw.between(1, len(facts))]:
        turns += _asked(draw, facts[i], values[i], (len(turns) - told) // 2)
    if draw.chance(0.1):
        turns += _never_told(draw, facts)
    return turns


def _in_one_message(draw: Draw) -> list[Turn]:
    """Facts and the question about one of them in the same message."""
    facts, values = _values(draw, 1, 2)
    i = draw.below(len(facts))
    kept = {f"v{n}": v for n, v in enumerate(values)}
    told = [_numbered(draw.pick(f.tell), v, n) for n, (f, v) in enumerate(zip(facts, values, strict=True))]
    join = draw.pick((" ", " ", "\n", " So, ", " Now: "))
    text = ask(draw, draw.pick((" ", " ", " And ")).join(told) + join + draw.pick(facts[i].ask), kept)
    check = Check("contains", {"all": [values[i]], "task": "told and asked at once"})
    return [user(text), assistant(_said(facts[i], values[i]), check)]


def _said_before(draw: Draw) -> list[Turn]:
    """What the user or the model said, word by word."""
    (fact,), (value,) = _values(draw, 1, 1)
    turns = _tell(draw, fact, value)
    turns += _aside(draw) if draw.chance(0.5) else []
    asked = [t.content for t in turns if t.role == "user"]
    form = draw.weighted((("last", 0.45), ("first", 0.3), ("answer", 0.25)))
    patterns = {
        "last": ("What (did I just say|did I just ask|was my last message|did I say last|have I just written)?", "(Repeat|Quote) (my last message|what I just said|what I just wrote).", "What was the last thing I (said|wrote)?"),
        "first": ("What was (my first message|the first thing I said|my first question)?", "(Repeat|Quote) my first message.", "What did I (say|write) first?", "How did I start this chat?"),
        "answer": ("(What did you just say|Say that again|Repeat that|Once more, please|Come again|Repeat your last answer|What was your answer)[?|]", "(Sorry, what|Pardon|What did you say)?", "Can you (repeat|say) that[ again|]?"),
    }[form]  # fmt: skip
    said = {
        "last": f'You said: "{asked[-1]}"',
        "first": f'You said: "{asked[0]}"',
        "answer": turns[-1].content,
    }[form]
    if len(said) > _SHORT:
        return _untold(draw)
    return [
        *turns,
        user(ask(draw, patterns)),
        assistant(said, Check("exact", {"text": said, "task": f"repeats: {form}"})),
    ]


def _untold(draw: Draw) -> list[Turn]:
    """A question about oneself before anything was told, and sometimes the fact after it."""
    (fact,), (value,) = _values(draw, 1, 1)
    turns = []
    for asked, thing in ((fact.ask, fact.thing),):
        check = Check("contains", {"all": ["not told me"], "task": "never told"})
        turns += [user(ask(draw, asked)), assistant(word(draw, _MISSING, x=thing), check)]
    if draw.chance(0.5):
        turns += _tell(draw, fact, value) + _asked(draw, fact, value, 0)
    return turns


def _corrected(draw: Draw) -> list[Turn]:
    """A fact that is corrected: the later word counts."""
    (fact,), (new,) = _values(draw, 1, 1)
    old = fact.value(draw)
    while old == new:
        old = fact.value(draw)
    turns = _tell(draw, fact, old)
    if draw.chance(0.3):
        turns += _aside(draw)
    if draw.chance(0.7):
        text = ask(draw, _CORRECTION, {"v": new, "old": old})
        said = _said(fact, new)
        turns += [
            user(text),
            assistant(draw.pick(("Okay, ", "Got it, ", "Noted: ")) + said[0].lower() + said[1:]),
        ]
    else:
        turns += _tell(
            draw,
            fact,
            new,
            draw.pick(("Sorry, I was wrong. ", "Correction: ", "That has changed. ")) + draw.pick(fact.tell),
        )
    check = Check("contains", {"all": [new], "task": "corrected"})
    return [*turns, *_between(draw, 1), user(ask(draw, fact.ask)), assistant(_said(fact, new), check)]


def _people(draw: Draw) -> list[Turn]:
    """The same said of two or three people, and asked for one of them."""
    state = draw.pick(STATES)
    names = draw.sample(NAMES, draw.between(2, 3))
    if draw.chance(0.2):
        names[0] = first_name(draw)
    values = draw.held(
        lambda: [state.value(draw) for _ in names],
        lambda v: f"people:{state.topic}:" + ",".join(f"{n}={x}" for n, x in zip(names, v, strict=True)),
    )
    say = expand(draw, draw.pick(state.say))
    kept = {
        f"{k}{i}": x
        for i, pair in enumerate(zip(names, values, strict=True))
        for k, x in zip("nv", pair, strict=True)
    }
    parts = [_numbered(say.replace("{n}", f"{{n{i}}}"), values[i], i) for i in range(len(names))]
    join = draw.pick((". ", ", ", " and ", ". "))
    turns = [user(ask(draw, join.join(parts) + ".", kept)), assistant(draw.pick(_ACKNOWLEDGE))]
    turns += _between(draw, 2)
    for i in draw.shuffled(range(len(names)))[: draw.between(1, 2)]:
        check = Check("contains", {"all": [values[i]], "task": "several people"})
        said = state.answer.replace("{n}", names[i]).replace("{v}", values[i])
        turns += [user(ask(draw, state.ask, n=names[i])), assistant(said, check)]
    if draw.chance(0.12):
        stranger = draw.pick([n for n in NAMES if n not in names])
        check = Check("contains", {"all": ["not told me"], "task": "never told"})
        turns += [
            user(ask(draw, state.ask, n=stranger)),
            assistant(f"You have not told me that about {stranger}.", check),
        ]
    return turns


def _things(draw: Draw) -> list[Turn]:
    """Things of the user, asked for with "what did I say about"."""

    def make() -> list[tuple[str, str, str]]:
        made: list[tuple[str, str, str]] = []
        for things, kind, predicates in draw.sample(THINGS, draw.between(1, 3)):
            thing = draw.pick([t for t in things.split() if t not in {m[0] for m in made}])
            made.append((thing, draw.pick(predicates), THING_VALUES[kind](draw)))
        return made

    told = draw.held(make, lambda m: "things:" + ",".join(f"{t} {p} {v}" for t, p, v in m))
    turns: list[Turn] = []
    for thing, predicate, value in told:
        turns += [
            user(ask(draw, f"My {thing} {predicate}." + draw.pick(_KEEP), {"v": value})),
            assistant(draw.pick(_ACKNOWLEDGE)),
        ]
    turns += _between(draw, 2)
    thing, predicate, value = draw.pick(told)
    said = f"You said that your {thing} {predicate.replace('{v}', value)}."
    check = Check("contains", {"all": [value], "task": "what was said about a thing"})
    turns += [user(ask(draw, _ABOUT, x=thing)), assistant(said, check)]
    if draw.chance(0.15):
        other = draw.pick(
            [t for things, _, _ in THINGS for t in things.split() if t not in {m[0] for m in told}]
        )
        check = Check("contains", {"all": ["not told me"], "task": "never told"})
        turns += [
            user(ask(draw, _ABOUT, x=other)),
            assistant(f"You have not told me anything about your {other}.", check),
        ]
    return turns


def _kept_list(draw: Draw) -> list[Turn]:
    """A list told once, then asked about and changed."""
    items = draw.held(
        lambda: draw.sample(FOODS + OBJECTS, draw.between(2, 5)), lambda i: "list:" + ",".join(i)
    )
    text = ask(
        draw,
        _LIST,
        {"items": ", ".join(items) if draw.chance(0.6) else listed(items)},
        kind=draw.pick(_LIST_KINDS),
    )
    turns = [
        user(text),
        assistant(draw.pick(("Got it.", "I will remember your list.", "Okay, I have your list.", "Noted."))),
    ]
    turns += _between(draw, 1)
    for _ in range(draw.between(1, 3)):
        form = draw.pick(("nth", "nth", "count", "show", "has", "add", "drop"))
        turns += _about_list(draw, form if len(items) > 1 or form != "drop" else "add", items)
    return turns


def _about_list(draw: Draw, form: str, items: list[str]) -> list[Turn]:
    """One question about the list, or one change of it."""
    other = draw.pick([x for x in FOODS + OBJECTS if x not in items])
    if form == "nth":
        at = draw.below(min(len(items), 5))
        nth = "last" if at == len(items) - 1 and draw.chance(0.5) else ORDINALS[at]
        asked, said = ask(draw, _NTH, nth=nth), f"The {nth} item is {items[at]}."
    elif form == "count":
        asked, said = ask(draw, _COUNT), f"There are {len(items)} items on your list."
    elif form == "has":
        thing = draw.pick((other, draw.pick(items)))
        said = f"Yes, {thing} is on your list." if thing in items else f"No, {thing} is not on your list."
        asked = ask(draw, _HAS, x=thing)
    else:
        if form == "add":
            items.append(other)
            asked = ask(draw, _ADD, {"x": other})
        elif form == "drop":
            thing = items.pop(draw.below(len(items)))
            asked = ask(draw, _DROP, {"x": thing})
        else:
            asked = ask(draw, _SHOW)
        said = f"Your list: {', '.join(items)}."
    return [user(asked), assistant(said, Check("exact", {"text": said, "task": f"a list: {form}"}))]


def make(draw: Draw) -> Conversation:
    """One conversation that needs its own past or the text it brings."""
    kind = draw.weighted((
        (_by_turns, 0.3), (_at_once, 0.12), (_untold, 0.05), (_in_one_message, 0.07), (_said_before, 0.03), (_corrected, 0.08), (_people, 0.09), (_things, 0.08), (_kept_list, 0.06),
        (reading.make, 0.2),
    ))  # fmt: skip
    return Conversation("recall", kind(draw))
