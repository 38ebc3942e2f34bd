"""Questions about a short text: the answer stands in it."""

from __future__ import annotations

from .conversation import Check, Turn, assistant, user
from .draw import Draw
from .lists import categories
from .tasks import about, answered, pairs, request, sections
from .words import (
    ANIMALS,
    COLORS,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    OBJECTS,
    PLACES,
    WEEKDAYS,
    article,
    city,
    code,
    first_name,
    plural,
)


def _values(draw: Draw, person: str, other: str) -> dict[str, str]:
    languages = next(c.members for c in categories() if c.one == "language")
    return {
        "p": person, "o": other, "city": city(draw), "ajob": article(draw.pick(JOBS)), "age": str(draw.between(8, 90)),
        "apet": article(draw.pick(ANIMALS)), "color": draw.pick(COLORS), "hobby": draw.pick(HOBBIES), "thing": draw.pick(OBJECTS),
        "athing": article(draw.pick(OBJECTS)), "place": draw.pick(PLACES), "day": draw.pick(WEEKDAYS), "food": plural(draw.pick(FOODS)),
        "language": draw.pick(languages), "code": code(draw),
    }  # fmt: skip


def turns(draw: Draw) -> list[Turn]:
    """Two to four facts about two people, and a question about one, now and then about none."""
    if draw.chance(0.12):
        return _found(draw)
    first, second, third = first_name(draw), draw.pick(NAMES), draw.pick(NAMES)
    if len({first, second, third}) < 3:
        third, second = "Quentin", "Beatrix"
    rows = draw.sample(pairs("reading", "facts"), draw.between(1, 3))
    told: list[tuple[str, str, str, dict[str, str]]] = []
    for fact, question, said in rows:
        for person in (first, second) if draw.chance(0.4) else (draw.pick((first, first, second)),):
            values = _values(draw, person, third)
            told.append(
                (fact.format_map(values), draw.pick(question.split("|")), said.format_map(values), values)
            )
    told = draw.shuffled(told)[:4]
    _, question, said, values = draw.pick(told)
    if draw.chance(0.08):
        _, question, _ = draw.pick([r for r in pairs("reading", "facts") if r not in rows])
        question, values = draw.pick(question.split("|")), _values(draw, first, third)
        said = sections("reading")["unknown"][0]
    lines = draw.chance(0.3)
    forms = sections("reading")["forms lines" if lines else "forms"]
    forms = tuple(f.replace("\\n", "\n").replace("{q}", question) for f in forms)
    asked = request(draw, "reading", forms, {**values, "t": " ".join(row[0] for row in told)})
    return [user(asked), assistant(said, Check("exact", {"text": said, "task": "question about a text"}))]


def _found(draw: Draw) -> list[Turn]:
    """The number, the name or the city in a sentence."""
    values = _values(draw, first_name(draw), "")
    fact, said = draw.pick((
        ("{p} has {age} books", "age"), ("The bus takes {age} minutes", "age"), ("{p} lost {athing}", "p"), ("{p} likes {hobby}", "p"),
        ("The ticket costs {age} euros", "age"), ("The train to {city} is late", "city"), ("We met in {city} on {day}", "city"),
        ("On {day} {p} went to the {place}", "p"), ("I booked a room in {city}", "city"),
    ))  # fmt: skip
    topic = {"age": "sentence number", "p": "sentence name", "city": "sentence city"}[said]
    asked = about(draw, topic, sections("reading")[topic], fact.format_map(values) + ".")
    return answered(asked, values[said], "find in a text")
