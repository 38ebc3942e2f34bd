"""Rewriting text: case, order, sorting, duplicates, picking, filling templates."""

# ruff: noqa: SIM905 -- word lists read better as text
from __future__ import annotations

from collections.abc import Callable

from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .words import ADJECTIVES, ANIMALS, FIELDS_OF_THINGS, NAMES, OBJECTS, PLACES, PLAIN_WORDS, invented

_VERBS = ("sees finds likes carries paints hides keeps follows brings loses wants cleans").split()


def sentence(draw: Draw) -> str:
    """A plain sentence of 5 to 12 words."""
    who = draw.pick(NAMES) if draw.chance(0.5) else f"The {draw.pick(ADJECTIVES)} {draw.pick(ANIMALS)}"
    what = f"the {draw.pick(ADJECTIVES)} {draw.pick(OBJECTS)}"
    where = draw.pick((f" in the {draw.pick(PLACES)}", f" near the {draw.pick(PLACES)}", ""))
    return f"{who} {draw.pick(_VERBS)} {what}{where}"


def _words(draw: Draw, low: int, high: int) -> list[str]:
    _, pool = draw.pick(FIELDS_OF_THINGS[:7])
    pool = PLAIN_WORDS if draw.chance(0.3) else pool
    words = draw.sample(pool, draw.between(low, high))
    if draw.chance(0.15):
        words[0] = invented(draw).lower()
    return words


def _turns(ask: str, said: str, task: str) -> list[Turn]:
    return [user(ask), assistant(said, Check("exact", {"text": said, "task": task}))]


def _held_sentence(draw: Draw) -> str:
    return draw.held(lambda: sentence(draw), lambda s: f"sentence:{s}")


def _held_words(draw: Draw, low: int, high: int) -> list[str]:
    return draw.held(lambda: _words(draw, low, high), lambda w: "words:" + ",".join(sorted(w)))


def _upper(draw: Draw) -> list[Turn]:
    text = _held_sentence(draw)
    ask = draw.pick(
        (
            "Write this in upper case",
            "Convert to uppercase",
            "Rewrite in capital letters",
            "Make this all caps",
        )
    )
    return _turns(ask + draw.pick((f": {text}", f":\n{text}")), text.upper(), "upper case")


def _lower(draw: Draw) -> list[Turn]:
    text = _held_sentence(draw)
    ask = draw.pick(("Write this in lower case", "Convert to lowercase", "Rewrite without capitals"))
    shown = text.upper() if draw.chance(0.6) else text
    return _turns(ask + draw.pick((f": {shown}", f":\n{shown}")), text.lower(), "lower case")


def _title(draw: Draw) -> list[Turn]:
    words = _held_words(draw, 3, 6)
    ask = draw.pick(
        (
            "Capitalize each word: {w}",
            "Start every word with a capital letter: {w}",
            "Write in title case: {w}",
        )
    )
    return _turns(ask.format(w=" ".join(words)), " ".join(w.capitalize() for w in words), "title case")


def _repeat(draw: Draw) -> list[Turn]:
    text = _held_sentence(draw)
    ask = draw.pick(("Repeat after me", "Repeat this sentence", "Copy this exactly", "Say exactly this"))
    return _turns(f"{ask}: {text}.", f"{text}.", "copy")


def _reverse_words(draw: Draw) -> list[Turn]:
    words = _held_words(draw, 3, 6)
    ask = draw.pick(("Reverse the order of these words: {w}", "Write these words backwards, last one first: {w}",
                     "Put these words in reverse order: {w}"))  # fmt: skip
    return _turns(ask.format(w=" ".join(words)), " ".join(reversed(words)), "reverse words")


def _reverse_letters(draw: Draw) -> list[Turn]:
    word = draw.held(lambda: draw.pick(PLAIN_WORDS), lambda w: f"backwards:{w}")
    ask = draw.pick(("Write the word {w} backwards.", "Reverse the letters of {w}.", "Spell {w} backwards."))
    said = f"{'-'.join(word)} backwards is {'-'.join(reversed(word))}."
    return _turns(ask.format(w=word), said, "reverse letters")


def _sort_words(draw: Draw) -> list[Turn]:
    words = _held_words(draw, 3, 6)
    ask = draw.pick(("Sort these words alphabetically: {w}", "Put these words in alphabetical order: {w}",
                     "Order from A to Z: {w}"))  # fmt: skip
    return _turns(ask.format(w=", ".join(words)), ", ".join(sorted(words)), "sort words")


def _sort_numbers(draw: Draw) -> list[Turn]:
    top = draw.pick((20, 99, 99, 500))
    numbers = draw.held(
        lambda: draw.sample(range(1, top + 1), draw.between(3, 6)),
        lambda n: "numbers:" + ",".join(map(str, sorted(n))),
    )
    down = draw.chance(0.35)
    up = (
        "Sort these numbers: {w}",
        "Sort from smallest to largest: {w}",
        "Put these numbers in increasing order: {w}",
    )
    back = ("Sort from largest to smallest: {w}", "Sort these numbers in descending order: {w}")
    ask = draw.pick(back if down else up).format(w=", ".join(map(str, numbers)))
    return _turns(ask, ", ".join(map(str, sorted(numbers, reverse=down))), "sort numbers")


def _extreme(draw: Draw) -> list[Turn]:
    top = draw.pick((20, 99, 999))
    numbers = draw.held(
        lambda: draw.sample(range(1, top + 1), draw.between(3, 5)),
        lambda n: "extreme:" + ",".join(map(str, sorted(n))),
    )
    large = draw.chance(0.5)
    word = draw.pick(("largest", "biggest", "highest") if large else ("smallest", "lowest"))
    ask = draw.pick(
        (
            "What is the {w} of these numbers: {n}?",
            "Which number is the {w}: {n}?",
            "Find the {w} number: {n}",
        )
    )
    said = str(max(numbers) if large else min(numbers))
    return _turns(ask.format(w=word, n=", ".join(map(str, numbers))), said, "largest number")


def _dedupe(draw: Draw) -> list[Turn]:
    words = _held_words(draw, 3, 5)
    doubled = draw.shuffled(words + draw.sample(words, draw.between(1, 2)))
    unique = list(dict.fromkeys(doubled))
    ask = draw.pick(
        (
            "Remove the duplicates: {w}",
            "Remove repeated words from this list: {w}",
            "List each item once: {w}",
        )
    )
    return _turns(ask.format(w=", ".join(doubled)), ", ".join(unique), "remove duplicates")


def _longest(draw: Draw) -> list[Turn]:
    def make() -> list[str]:
        while True:
            words = _words(draw, 3, 5)
            sizes = sorted(len(w) for w in words)
            if sizes[-1] > sizes[-2] and sizes[0] < sizes[1]:
                return words

    words = draw.held(make, lambda w: "longest:" + ",".join(sorted(w)))
    long = draw.chance(0.6)
    ask = f"Which word is the {'longest' if long else 'shortest'}: {', '.join(words)}?"
    return _turns(ask, max(words, key=len) if long else min(words, key=len), "longest word")


def _replace(draw: Draw) -> list[Turn]:
    text = _held_sentence(draw)
    old = draw.pick(text.split())
    new = draw.pick(PLAIN_WORDS)
    ask = draw.pick(
        ('Replace "{o}" with "{n}" in this sentence: {t}', "In the sentence '{t}', change {o} to {n}.")
    )
    said = " ".join(new if w == old else w for w in text.split())
    return _turns(ask.format(o=old, n=new, t=text), said, "replace word")


def _delete(draw: Draw) -> list[Turn]:
    words = _held_words(draw, 4, 7)
    gone = draw.pick(words)
    ask = draw.pick(
        ("Remove {g} from this list: {w}", "Take {g} out of the list {w}.", "List these without {g}: {w}")
    )
    return _turns(
        ask.format(g=gone, w=", ".join(words)), ", ".join(w for w in words if w != gone), "remove item"
    )


def _bullets(draw: Draw) -> list[Turn]:
    words = _held_words(draw, 3, 6)
    numbered = draw.chance(0.5)
    ask = "Make a numbered list of: {w}" if numbered else "Make a bullet list of: {w}"
    lines = [f"{i}. {w}" if numbered else f"- {w}" for i, w in enumerate(words, 1)]
    return _turns(ask.format(w=", ".join(words)), "\n".join(lines), "make list")


def _json_list(draw: Draw) -> list[Turn]:
    words = _held_words(draw, 2, 6)
    ask = draw.pick(
        ("Write as a JSON array: {w}", "Turn this list into JSON: {w}", "Give me a JSON list of {w}.")
    )
    said = "[" + ", ".join(f'"{w}"' for w in words) + "]"
    return _turns(ask.format(w=", ".join(words)), said, "json array")


def _acronym(draw: Draw) -> list[Turn]:
    words = _held_words(draw, 3, 5)
    ask = draw.pick(
        ("Take the first letter of each word: {w}", "What are the first letters of these words: {w}?")
    )
    return _turns(ask.format(w=" ".join(words)), " ".join(w[0] for w in words), "first letters")


_TASKS: tuple[tuple[Callable[[Draw], list[Turn]], float], ...] = (
    (_upper, 1.2), (_lower, 1.2), (_title, 0.8), (_repeat, 0.7), (_reverse_words, 1.2), (_reverse_letters, 0.8),
    (_sort_words, 1.6), (_sort_numbers, 1.6), (_extreme, 1.0), (_dedupe, 1.0), (_longest, 0.8), (_replace, 1.0),
    (_delete, 0.8), (_bullets, 0.7), (_json_list, 0.7), (_acronym, 0.6),
)  # fmt: skip


def make(draw: Draw) -> Conversation:
    """One rewriting task."""
    return Conversation("rewriting", draw.weighted(_TASKS)(draw))
