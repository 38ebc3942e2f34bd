"""Greetings, thanks, feelings, who the model is, jokes, riddles, and names."""

from __future__ import annotations

from . import faq, tables
from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .faq import capitalised
from .wording import ask, expand, plain, typed, word
from .words import (
    ANIMALS,
    COLORS,
    HOBBIES,
    JOBS,
    MEALS,
    OBJECTS,
    PLACES,
    PLAIN_WORDS,
    WEEKDAYS,
    article,
    city,
    first_name,
    full_name,
    invented,
)

_GREETINGS = 4  # entries at the head of faq/smalltalk.txt
_MY_NAME = (
    "My name is {name}",
    "(Hi|Hello), my name is {name}",
    "(My name is|I'm|I am|Call me|You can call me|My name's|the name is|they call me|people call me) {name}",
    "(Hi|Hello|Hey)(,|!) (I'm|I am|my name is|this is) {name}",
    "(Hi|Hello|Hey), {name} here",
    "(Good morning|Good evening), (my name is|I am) {name}",
    "(Please remember that|Remember:|By the way,|Just so you know,) my name is {name}",
    "{name} is my name",
)
_NICE = (
    "Nice to meet you, {name}! How can I help you?", "Hello, {name}! What can I do for you?", "Hi {name}! Nice to meet you.",
    "Welcome, {name}! What would you like to do?", "Pleased to meet you, {name}. I'm quire-mini.",
)  # fmt: skip
_WHO_AM_I = (
    "What is my name?", "What's my name?", "(What is|What's|Tell me|Do you know|Do you remember|Can you remember|Say) my name?", "Who am I?", "What am I called?",
    "(What|How) did I say my name was?", "Do you [still ]know (my name|who I am)?", "(my name|my name?|say my name|and my name)",
    "What was my name [again]?",
)  # fmt: skip
_SAY = (
    'Say "{text}"[ please]', 'Repeat "{text}"', "(Repeat after me|Repeat|Say|Write|Say this|Type|Print|Echo this): {text}", "(Please say|Can you say|Just say|Only say) \"{text}\"",
    "Say the words: {text}",
)  # fmt: skip
_RIDDLE_ASKS = (
    "Tell me a riddle", "Ask me a riddle", "A riddle", "(Ask|Tell|Give) me (a|another|one more|an easy|a hard|a good) riddle[ please]", "(riddle|a riddle|riddles|a riddle please|riddle me this|another riddle|riddle please)",
    "(Do you know|Have you got|Can you ask me|Can I have|I want|I'd like) (a riddle|another riddle|an easy riddle|a good riddle)", "Let's (play|do) riddles", "Test me with a riddle",
)  # fmt: skip
_GIVE_UP = (
    "(I don't know|No idea|I give up|Tell me|idk|What is it|What|What is the answer|The answer please|Hmm|You tell me|I have no clue|dunno|solution|Solve it|Give me the answer)",
)  # fmt: skip
_GUESS = ("(Is it|It is|Maybe|I think it is|I guess it's|Could it be) {guess}", "{guess}")
_RIGHT = ("Yes, it is {answer}! Well done.", "That's right: {answer}!", "Exactly, {answer}! Another one?")
_WRONG = ("No, it is {answer}.", "Not quite. The answer is {answer}.", "Good try, but it is {answer}.")
_SOLVED = ("It is {answer}.", "The answer is {answer}.", "{answer}! Would you like another one?")


def _contains(what: str, task: str) -> Check:
    return Check("contains", {"all": [what], "task": task})


def _exchange(draw: Draw, entries: tuple[faq.Entry, ...], topic: str) -> list[Turn]:
    """One of the entries. All wordings are learned; the wording and its answer together belong to one split."""

    def make() -> tuple[faq.Entry, str, str]:
        entry = draw.weighted([(e, len(e.asks)) for e in entries])
        return entry, expand(draw, draw.pick(entry.asks)), expand(draw, draw.pick(entry.answers))

    entry, asked, said = draw.held(make, lambda p: f"{topic}|{plain(p[1])}|{plain(p[2])}")
    return [user(typed(draw, [asked], courtesy=False)), assistant(said, faq.contains(entry.must, topic))]


def greeting(draw: Draw) -> list[Turn]:
    """Hello and hello back."""
    return (
        _named(draw) if draw.chance(0.2) else _exchange(draw, faq.load("smalltalk")[:_GREETINGS], "greeting")
    )


def chat(draw: Draw) -> list[Turn]:
    """What people say when they don't ask for anything."""
    return _exchange(draw, faq.load("smalltalk")[_GREETINGS:], "small talk")


def statement(draw: Draw) -> list[Turn]:
    """What users tell about themselves."""
    return faq.slotted(draw, faq.load("statements"), "what users tell", _filling)[1]


def _filling(draw: Draw, name: str) -> str:
    """Something for a slot of a statement."""
    pools = {
        "animal": ANIMALS, "food": MEALS, "object": OBJECTS, "hobby": HOBBIES, "job": JOBS, "color": COLORS, "day": WEEKDAYS,
        "place": PLACES, "few": ("two", "three", "four", "five"),
    }  # fmt: skip
    if name.startswith("a_"):
        return article(_filling(draw, name[2:]))
    if name == "age":
        return str(draw.between(6, 90))
    makers = {"name": first_name, "city": city}
    return makers[name](draw) if name in makers else draw.pick(pools[name])


def chance(draw: Draw) -> list[Turn]:
    """A coin, a number, a name: what any answer is good for."""
    return _exchange(draw, faq.load("random"), "chance")


def identity(draw: Draw) -> list[Turn]:
    """Who the model is and what it can do."""
    return _exchange(draw, faq.load("identity"), "identity")


def _named(draw: Draw) -> list[Turn]:
    """The user tells a name; the answer uses it."""
    name = draw.held(
        lambda: first_name(draw) if draw.chance(0.8) else full_name(draw), lambda n: f"my name|{n}"
    )
    told = name.lower() if draw.chance(0.2) else name
    asked = ask(draw, _MY_NAME, {"name": told})
    return [
        user(asked),
        assistant(word(draw, _NICE, name=name).replace("!,", "!"), _contains(name, "greeting by name")),
    ]


def _remembered(draw: Draw) -> list[Turn]:
    """A name told, some other talk, the name asked for."""
    turns = _named(draw)
    name = turns[1].check.data["all"][0] if turns[1].check else ""
    for _ in range(draw.weighted(((0, 0.4), (1, 0.35), (2, 0.25)))):
        turns += draw.pick((chat, identity, joke))(draw)
    said = word(draw, ("Your name is {name}.", "You are {name}.", "You told me: {name}."), name=name)
    return [*turns, user(ask(draw, _WHO_AM_I)), assistant(said, _contains(name, "the user's name"))]


def _nameless(draw: Draw) -> list[Turn]:
    """The name asked for and never told."""
    form = draw.held(lambda: expand(draw, draw.pick(_WHO_AM_I)), lambda f: f"no name|{plain(f)}")
    said = word(
        draw,
        (
            "You haven't told me your name yet. What is it?",
            "I don't know your name yet. What should I call you?",
        ),
    )
    return [user(typed(draw, [form])), assistant(said, _contains("your name", "no name told"))]


def joke(draw: Draw) -> list[Turn]:
    """A joke, a fun fact, a proverb or a tongue twister."""
    name = draw.weighted((("jokes", 0.5), ("curious", 0.27), ("proverbs", 0.15), ("twisters", 0.08)))
    relation = tables.relations(name)[0]
    fact = draw.held(
        lambda: tables.fact(draw, relation, draw.pick(relation.rows)),
        lambda f: f"{name}|{plain(f.asked)}|{plain(f.said)}",
    )
    return [user(typed(draw, [fact.asked], courtesy=False)), assistant(fact.said)]


def _knocked(draw: Draw) -> list[Turn]:
    """Knock knock. Who's there?"""
    name = draw.held(
        lambda: draw.pick((first_name(draw), draw.pick(ANIMALS), draw.pick(OBJECTS))), lambda n: f"knock|{n}"
    )
    turns = [user(typed(draw, ["Knock knock"], courtesy=False)), assistant("Who's there?")]
    asked = user(ask(draw, ("{name}", "It's {name}", "{name}."), {"name": name}))
    turns += [asked, assistant(f"{capitalised(name)} who?", _contains(f"{name} who", "knock knock"))]
    if draw.chance(0.5):
        line = draw.pick(("it's me", "open the door", "come and see", "you know me", "let me in"))
        reply = draw.pick(("Ha! Good one.", "Ha ha, I didn't see that coming!", "Very funny!"))
        turns += [user(f"{name} {line}!"), assistant(reply)]
    return turns


def _echo(draw: Draw) -> list[Turn]:
    """Say this."""
    text = draw.held(lambda: _said_text(draw), lambda t: f"echo|{t}")
    return [
        user(ask(draw, _SAY, {"text": text})),
        assistant(text, Check("exact", {"text": text, "task": "say this"})),
    ]


def _said_text(draw: Draw) -> str:
    """Something to say."""
    kind = draw.below(4)
    if kind == 0:
        return draw.pick(PLAIN_WORDS)
    if kind == 1:
        return invented(draw, draw.between(1, 3))
    slots = {"n": first_name(draw), "x": draw.pick(OBJECTS), "c": draw.pick(COLORS)}
    forms = (
        "I like {x}s",
        "Hello {n}",
        "{n} has my {x}",
        "the {x} is {c}",
        "{n} is my friend",
        "{c} {x}",
        "{n} and the {x}",
    )
    return word(draw, forms, **slots)


def riddle(draw: Draw) -> list[Turn]:
    """A riddle, a guess, the solution; or the user asks the riddle."""
    if draw.chance(0.3):
        return tables.any_fact(draw, "riddles", "riddles").turns(draw, "riddles")
    rows = tables.rows("riddles")
    row, form = draw.held(
        lambda: (draw.pick(rows), expand(draw, draw.pick(_RIDDLE_ASKS))),
        lambda p: f"riddle|{p[0]['riddle']}|{plain(p[1])}",
    )
    solution = row["answer"]
    turns = [user(typed(draw, [form], courtesy=False)), assistant(row["riddle"])]
    kind = draw.weighted((("give up", 0.5), ("right", 0.25), ("wrong", 0.25)))
    guess = solution if kind == "right" else draw.pick([r["answer"] for r in rows if r["answer"] != solution])
    reply = word(draw, {"give up": _SOLVED, "right": _RIGHT, "wrong": _WRONG}[kind], answer=solution)
    asked = word(draw, _GIVE_UP if kind == "give up" else _GUESS, guess=guess)
    said = user(typed(draw, [capitalised(asked)], courtesy=False))
    return [*turns, said, assistant(capitalised(reply), _contains(solution, "riddles"))]


def make(draw: Draw) -> Conversation:
    """One exchange, or a little chat of several."""
    kind = draw.weighted(
        (
            (greeting, 0.2), (chat, 0.22), (statement, 0.09), (identity, 0.2), (joke, 0.09), (riddle, 0.05), (chance, 0.05), (_knocked, 0.01), (_echo, 0.04), (_remembered, 0.1), (_nameless, 0.02),
        )
    )  # fmt: skip
    turns = kind(draw)
    if kind is not _nameless and (kind is greeting or draw.chance(0.3)):
        for _ in range(draw.weighted(((0, 0.5), (1, 0.3), (2, 0.15), (3, 0.05)))):
            turns += draw.weighted(((chat, 0.4), (statement, 0.1), (identity, 0.35), (joke, 0.15)))(draw)
    return Conversation("smalltalk", turns)
