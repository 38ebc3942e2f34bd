"""Counting: letters of a word, words of a sentence, items of a list, sequences of numbers."""

from __future__ import annotations

from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .words import FIELDS_OF_THINGS, PLAIN_WORDS, casual, invented, listed, plural

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def _word(draw: Draw) -> str:
    return invented(draw).lower() if draw.chance(0.2) else draw.pick(PLAIN_WORDS)


def _letter(draw: Draw) -> list[Turn]:
    """Spell the word, number each hit, then say the count."""

    def make() -> tuple[str, str]:
        word = _word(draw)
        return word, draw.pick(word) if draw.chance(0.8) else draw.pick("abcdefghilmnoprstu")

    word, letter = draw.held(make, lambda p: f"letters:{p[0]}:{p[1]}")
    seen, parts = 0, []
    for char in word:
        seen += char == letter
        parts.append(f"{char} ({seen})" if char == letter else char)
    ask = draw.pick((
        'How many times does the letter "{l}" appear in "{w}"?', "How many {l}s are in {w}?",
        "Count the letter {l} in the word {w}.", 'How many "{l}" are there in the word "{w}"?',
    )).format(l=letter, w=word)  # fmt: skip
    times = "once" if seen == 1 else f"{seen} times"
    said = f'{", ".join(parts)}. The letter "{letter}" appears {times}.' if seen else (
        f'{", ".join(parts)}. The letter "{letter}" does not appear.')  # fmt: skip
    return [user(ask), assistant(said, Check("exact", {"text": said, "task": "letters"}))]


def _length(draw: Draw) -> list[Turn]:
    word = draw.held(lambda: _word(draw), lambda w: f"length:{w}")
    ask = draw.pick(("How many letters are in the word {w}?", 'How many letters does "{w}" have?',
                     "Count the letters of {w}.")).format(w=word)  # fmt: skip
    said = ", ".join(f"{c} {i}" for i, c in enumerate(word, 1)) + f". It has {len(word)} letters."
    return [user(ask), assistant(said, Check("exact", {"text": said, "task": "length"}))]


def _spell(draw: Draw) -> list[Turn]:
    word = draw.held(lambda: _word(draw), lambda w: f"spell:{w}")
    ask = draw.pick(("Spell the word {w}.", "How do you spell {w}?", "Spell {w} letter by letter."))
    said = "-".join(word)
    return [
        user(casual(draw, ask.format(w=word))),
        assistant(said, Check("exact", {"text": said, "task": "spell"})),
    ]


def _items(draw: Draw) -> list[Turn]:
    name, pool = draw.pick(FIELDS_OF_THINGS)
    count = draw.between(2, 7)
    items = draw.held(lambda: draw.sample(pool, count), lambda p: "items:" + ",".join(sorted(p)))
    ask = draw.pick(
        ("How many {k} are in this list: {i}?", "Count the {k}: {i}", "Here is a list: {i}. How many items?")
    )
    numbered = ", ".join(f"{n} {item}" for n, item in enumerate(items, 1))
    said = f"{numbered}. There are {count} {name if 'items' not in ask else 'items'}."
    text = ask.format(k=name, i=", ".join(items))
    return [user(text), assistant(said, Check("exact", {"text": said, "task": "items"}))]


def _nth(draw: Draw) -> list[Turn]:
    _, pool = draw.pick(FIELDS_OF_THINGS)
    count = draw.between(3, 6)

    def make() -> tuple[list[str], int]:
        return draw.sample(pool, count), draw.below(count + 1)

    items, at = draw.held(make, lambda p: f"nth:{p[1]}:" + ",".join(p[0]))
    which = _ORDINALS[at] if at < count else "last"
    ask = draw.pick(("What is the {n} item in this list: {i}?", "Here is a list: {i}. Which one is {n}?"))
    said = items[at] if at < count else items[-1]
    text = ask.format(n=which if "item" in ask else f"the {which}", i=", ".join(items))
    return [user(text), assistant(said, Check("exact", {"text": said, "task": "nth"}))]


def _sequence(draw: Draw) -> list[Turn]:
    def make() -> tuple[int, int, int]:
        return (
            draw.between(1, 60),
            draw.weighted(((1, 0.5), (2, 0.2), (5, 0.15), (10, 0.15))),
            draw.between(4, 9),
        )

    start, step, count = draw.held(make, lambda p: f"sequence:{p}")
    down = draw.chance(0.2)
    numbers = [start + i * step for i in range(count)]
    numbers = numbers[::-1] if down else numbers
    by = "" if step == 1 else f" in steps of {step}"
    ask = draw.pick(("Count from {a} to {b}{s}.", "Please count from {a} to {b}{s}."))
    said = ", ".join(map(str, numbers))
    text = ask.format(a=numbers[0], b=numbers[-1], s=by)
    return [user(casual(draw, text)), assistant(said, Check("exact", {"text": said, "task": "sequence"}))]


def _groups(draw: Draw) -> list[Turn]:
    """Count one kind of thing among others in a sentence."""
    _, pool = draw.pick([FIELDS_OF_THINGS[i] for i in (0, 2, 3)])

    def make() -> list[tuple[str, int]]:
        return [(item, draw.between(2, 9)) for item in draw.sample(pool, draw.between(2, 3))]

    things = draw.held(make, lambda p: f"groups:{p}")
    ask_for, count = draw.pick(things)
    scene = listed([f"{n} {plural(item)}" for item, n in things])
    ask = draw.pick(("There are {s}. How many {w} are there?", "I see {s}. How many {w} do I see?"))
    said = f"{count} {plural(ask_for)}."
    text = ask.format(s=scene, w=plural(ask_for))
    return [user(text), assistant(said, Check("exact", {"text": said, "task": "groups"}))]


def make(draw: Draw) -> Conversation:
    """One counting question."""
    kinds = (
        (_letter, 0.3),
        (_length, 0.12),
        (_spell, 0.1),
        (_items, 0.18),
        (_nth, 0.1),
        (_sequence, 0.12),
        (_groups, 0.08),
    )
    return Conversation("counting", draw.weighted(kinds)(draw))
