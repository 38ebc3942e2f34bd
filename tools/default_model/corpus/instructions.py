"""Following how to answer: one word, a number of sentences, JSON only, a style set by the system prompt."""

from __future__ import annotations

import json
from collections.abc import Callable

from . import glossary
from .conversation import Check, Conversation, Turn, assistant, system, user
from .draw import Draw
from .words import ANIMALS, COLORS, FIELDS_OF_THINGS, FOODS, JOBS, OBJECTS, PLACES, article, plural

# What can be said of things in simple words; {x} is the plural.
_LINES = {
    "animal": (
        "Many people like {x}.", "Some {x} are small and some are large.", "You can learn a lot by watching {x}.",
        "Children often draw {x}.", "There are many stories about {x}.", "Every day {x} look for food.",
        "It is fun to see {x} play.", "At night most {x} find a place to sleep.",
    ),
    "food": (
        "Many people like {x}.", "You can buy {x} at the market.", "A cook can do a lot with {x}.",
        "Children often ask for {x}.", "It is nice to share {x} with friends.", "Fresh {x} smell good.",
        "A picnic is better with {x}.", "My kitchen would not be complete without {x}.",
    ),
    "object": (
        "Many homes have {x}.", "You can buy {x} in a shop.", "Some {x} are old and some are new.",
        "It is good to take care of {x}.", "People have used {x} for a long time.", "Good {x} last for years.",
        "You can give {x} as a gift.", "Without {x} some jobs would be harder.",
    ),
    "place": (
        "Many people visit {x}.", "Some {x} are quiet and some are busy.", "You can meet friends near {x}.",
        "Children like to explore {x}.", "There are many songs about {x}.", "In the morning {x} look beautiful.",
        "It is good to keep {x} clean.", "A walk is a fine way to see {x}.",
    ),
}  # fmt: skip
_POOLS = {"animal": ANIMALS, "food": FOODS, "object": OBJECTS, "place": PLACES}
_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}


def topic(draw: Draw, key: str) -> tuple[str, str]:
    """A kind of thing and a thing of that kind."""

    def make() -> tuple[str, str]:
        kind = draw.pick(list(_POOLS))
        return kind, draw.pick(_POOLS[kind])

    return draw.held(make, lambda p: f"{key}:{p[1]}")


def lines_about(draw: Draw, kind: str, thing: str, count: int) -> list[str]:
    """`count` simple sentences about a thing."""
    return [line.format(x=plural(thing)) for line in draw.sample(_LINES[kind], count)]


def _sentences(draw: Draw) -> list[Turn]:
    count = draw.between(1, 5)
    kind, thing = topic(draw, f"sentences:{count}")
    word = _NUMBERS[count] if draw.chance(0.6) else str(count)
    noun = "sentence" if count == 1 else "sentences"
    ask = draw.pick(("Write {n} {s} about {x}.", "Tell me about {x} in {n} {s}.", "In {n} {s}, describe {x}.",
                     "Give me {n} {s} on {x}."))  # fmt: skip
    said = " ".join(lines_about(draw, kind, thing, count))
    check = Check("sentences", {"count": count, "about": plural(thing), "task": "number of sentences"})
    return [user(ask.format(n=word, s=noun, x=plural(thing))), assistant(said, check)]


def _one_word(draw: Draw) -> list[Turn]:
    """A question about a word's kind, answered in one word."""
    options = FIELDS_OF_THINGS[:5]

    def make() -> tuple[str, str]:
        name, pool = draw.pick(options)
        return name[:-1], draw.pick(pool)

    kind, thing = draw.held(make, lambda p: f"kind:{p[1]}")
    other = draw.pick([name[:-1] for name, _ in options if name[:-1] != kind])
    first, second = draw.shuffled([kind, other])
    ask = draw.pick(("Is {x} {a} or {b}? Answer in one word.", "Answer in one word: is {x} {a} or {b}?",
                     "One word only: {x}, {a} or {b}?"))  # fmt: skip
    text = ask.format(x=thing, a=article(first), b=article(second))
    said = kind.capitalize()
    return [user(text), assistant(said, Check("exact", {"text": said, "task": "one word"}))]


def _yes_no(draw: Draw) -> list[Turn]:
    options = FIELDS_OF_THINGS[:5]

    def make() -> tuple[str, str, str]:
        name, pool = draw.pick(options)
        asked = name if draw.chance(0.5) else draw.pick([n for n, _ in options if n != name])
        return name[:-1], draw.pick(pool), asked[:-1]

    kind, thing, asked = draw.held(make, lambda p: f"yesno:{p[1]}:{p[2]}")
    ask = draw.pick(
        ("Is {x} {a}? Answer yes or no.", "Yes or no: is {x} {a}?", "Is {x} {a}? Just say yes or no.")
    )
    said = "Yes" if kind == asked else "No"
    check = Check("exact", {"text": said, "task": "yes or no"})
    return [user(ask.format(x=thing, a=article(asked))), assistant(said, check)]


def _list_of(draw: Draw) -> list[Turn]:
    forms = ("commas", "bullets", "numbers")
    count, (name, pool), form = draw.held(
        lambda: (draw.between(2, 6), draw.pick(FIELDS_OF_THINGS), draw.pick(forms)),
        lambda p: f"list:{p[0]}:{p[1][0]}:{p[2]}",
    )
    tail = {
        "commas": ", separated by commas",
        "bullets": " as a bullet list",
        "numbers": " as a numbered list",
    }[form]
    word = _NUMBERS.get(count, str(count)) if draw.chance(0.5) else str(count)
    ask = draw.pick(("Name {n} {k}{t}.", "List {n} {k}{t}.", "Give me {n} {k}{t}."))
    items = draw.sample(pool, count)
    lines = {"commas": ", ".join(items), "bullets": "\n".join(f"- {i}" for i in items),
             "numbers": "\n".join(f"{n}. {i}" for n, i in enumerate(items, 1))}  # fmt: skip
    check = Check("list", {"count": count, "form": form, "options": list(pool), "task": "list of N"})
    return [user(ask.format(n=word, k=name, t=tail)), assistant(lines[form], check)]


def _json_only(draw: Draw) -> list[Turn]:
    """An answer inside a JSON object with the key that the prompt names."""
    keys = ("answer", "reply", "result", "text", "output", "message")
    key, (name, definition) = draw.held(
        lambda: (draw.pick(keys), glossary.definition(draw)), lambda p: f"jsonly:{p[0]}:{p[1][0]}"
    )
    said = json.dumps({key: definition}, ensure_ascii=False)
    schema = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    check = Check("json_shape", {"schema": schema, "task": "JSON only"})
    if draw.chance(0.5):
        told = draw.pick(
            ('Reply only with JSON with the key "{k}".', 'Always answer as a JSON object {{"{k}": ...}}.')
        )
        return [system(told.format(k=key)), user(f"What is {name}?"), assistant(said, check)]
    ask = draw.pick(
        ('What is {n}? Reply only with JSON with the key "{k}".', 'Define {n} as JSON with one key, "{k}".')
    )
    return [user(ask.format(n=name, k=key)), assistant(said, check)]


def _styled(draw: Draw) -> list[Turn]:
    """The system prompt sets a style for the answer."""
    kind, thing = topic(draw, "style")
    lines = " ".join(lines_about(draw, kind, thing, draw.between(1, 3)))
    closing = draw.pick(("Over.", "Thank you.", "The end.", "Yours truly.", "Stay curious!"))
    opening = draw.pick(("Well,", "Dear friend,", "Indeed,", "Listen:", "Sure!"))
    style = draw.pick(("upper", "lower", "end", "start"))
    told, said = {
        "upper": (draw.pick(("Answer in upper case.", "Write everything in capital letters.")), lines.upper()),
        "lower": (draw.pick(("Answer in lower case.", "Use no capital letters.")), lines.lower()),
        "end": (draw.pick(("Always end with '{c}'", "End every answer with the words '{c}'")).format(c=closing), f"{lines} {closing}"),
        "start": (draw.pick(("Start every answer with '{o}'", "Always begin with '{o}'")).format(o=opening), f"{opening} {lines}"),
    }[style]  # fmt: skip
    check = Check("style", {"style": style, "opening": opening, "closing": closing, "task": f"style {style}"})
    ask = draw.pick(
        ("Tell me about {x}.", "What can you say about {x}?", "Write about {x}.", "Describe {x}.")
    )
    return [system(told), user(ask.format(x=plural(thing))), assistant(said, check)]


def _choose(draw: Draw) -> list[Turn]:
    """Pick the option the user describes."""
    pools = [("an animal", ANIMALS), ("a color", COLORS), ("a job", JOBS), ("a place", PLACES)]

    def make() -> list[str]:
        return [draw.pick(pool) for _, pool in pools]

    items = draw.held(make, lambda p: f"choose:{p}")
    wanted = draw.below(len(pools))
    ask = draw.pick(("Which of these is {k}: {i}?", "From this list, pick {k}: {i}"))
    text = ask.format(k=pools[wanted][0], i=", ".join(draw.shuffled(items)))
    return [user(text), assistant(items[wanted], Check("exact", {"text": items[wanted], "task": "choose"}))]


_TASKS: tuple[tuple[Callable[[Draw], list[Turn]], float], ...] = (
    (_sentences, 0.28), (_one_word, 0.12), (_yes_no, 0.1), (_list_of, 0.14), (_json_only, 0.12), (_styled, 0.16),
    (_choose, 0.08),
)  # fmt: skip


def make(draw: Draw) -> Conversation:
    """One question with an instruction on how to answer."""
    return Conversation("instructions", draw.weighted(_TASKS)(draw))
