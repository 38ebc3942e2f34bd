"""Words in their forms: plurals, past tenses, opposites, synonyms, rhymes."""

from __future__ import annotations

from .conversation import Check, Turn, assistant, user
from .draw import Draw
from .tasks import answered, pairs, request, sections
from .words import article


def _table(topic: str) -> tuple[tuple[str, str], ...]:
    if topic == "past word":
        rows = [(base, past) for base, _, past, _ in pairs("language", "verbs")]
        return (*rows, *((a, b) for a, b in pairs("language", "more past")))
    name = {
        "plural word": "plurals",
        "singular word": "plurals",
        "opposite": "opposites",
        "synonym": "synonyms",
    }[topic]
    rows = [(a, b) for a, b in pairs("language", name)]
    return tuple((b, a) for a, b in rows if a != b) if topic == "singular word" else tuple(rows)


_SAID = {
    "plural word": "The plural of {t} is {v}.", "singular word": "The singular of {t} is {v}.",
    "past word": "The past tense of {t} is {v}.", "opposite": "The opposite of {t} is {v}.",
    "synonym": "Another word for {t} is {v}.",
}  # fmt: skip


def turns(draw: Draw) -> list[Turn]:
    """One question about a word, now and then followed by another one of the kind."""
    topic = draw.weighted((("plural word", 0.2), ("singular word", 0.06), ("past word", 0.16), ("opposite", 0.26),
                           ("synonym", 0.16), ("rhyme", 0.12), ("article", 0.04)))  # fmt: skip
    if topic == "rhyme":
        return _rhyme(draw)
    if topic == "article":
        name = draw.pick([a for a, _ in pairs("language", "plurals")])
        asked = request(draw, topic, sections("rewriting")[topic], {"t": name})
        return answered(asked, f"It is {article(name)}.", "a or an")
    made: list[Turn] = []
    asks = sections("rewriting")[topic]
    while not made or draw.chance(0.25):
        word, value = draw.pick(_table(topic))
        shown = word if draw.chance(0.85) else word.capitalize()
        asked = request(draw, topic, asks, {"t": shown})
        made += answered(asked, _SAID[topic].format(t=word, v=value), topic)
        asks = ("(And|And of|What about|How about|Now) {t}[?]",)
    return made


def _rhyme(draw: Draw) -> list[Turn]:
    """Any other word of the group is right."""
    group = draw.pick(sections("language")["rhymes"]).split()
    word, said = draw.sample(group, 2)
    asked = request(draw, "rhyme", sections("rewriting")["rhyme"], {"t": word})
    options = "|".join(w for w in group if w != word)
    check = Check("match", {"pattern": f"{word.capitalize()} rhymes with ({options})\\.", "task": "rhyme"})
    return [user(asked), assistant(f"{word.capitalize()} rhymes with {said}.", check)]
