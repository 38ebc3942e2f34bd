"""Manners of speaking: the text of an answer made to follow a wish, and whether a text follows it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from .draw import Draw

PIRATE_OPENINGS = ("Arr!", "Ahoy!", "Shiver me timbers!", "Yo ho!", "Blimey!")
_PIRATE_CLOSINGS = ("matey", "me hearty", "ye landlubber", "says the captain", "by the seven seas")
_PIRATE_WORDS = {
    "You": "Ye", "you": "ye", "Your": "Yer", "your": "yer", "My": "Me", "my": "me", "is": "be", "are": "be", "am": "be", "Hello": "Ahoy",
    "Hi": "Ahoy", "friend": "matey", "Yes": "Aye", "yes": "aye", "the": "th'", "of": "o'", "and": "an'", "for": "fer",
    "people": "buccaneers",
}  # fmt: skip
# What other characters say before and after an answer.
CHARACTERS = {
    "robot": ("Beep boop.", "Beep."), "cowboy": ("Howdy, partner!", "Yee-haw!"), "cat": ("Meow!", "Purr."),
    "dog": ("Woof!", "Woof woof!"), "butler": ("Very good, sir.", "At your service."), "ghost": ("Boo!", "Whooo."),
    "wizard": ("By my beard!", "So it is written."), "king": ("Hear me!", "The king has spoken."), "owl": ("Hoo!", "Hoo hoo."),
    "knight": ("By my sword!", "On my honor."), "duck": ("Quack!", "Quack quack."), "elf": ("By the stars!", "May the forest keep you."),
    "soldier": ("Sir, yes, sir!", "Over and out."), "surfer": ("Dude!", "Totally, dude."), "cook": ("Bon appetit!", "Well seasoned, my friend."),
}  # fmt: skip
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"])")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_HELLO = re.compile(r"^(Hello|Hi there|Hi|Hey|Welcome)(?=[!,.])")
_WORD = re.compile(r"[A-Za-z]+")
BRIEF = 160  # characters of a brief answer, at most


@dataclass(frozen=True, slots=True)
class Manner:
    """A way to answer. `value` is what some ways need: the closing words, the name, the JSON key, the character."""

    kind: str
    value: str = ""


def sentences(text: str) -> list[str]:
    return _SENTENCE.split(text)


def follow(draw: Draw, manner: Manner, text: str) -> str | None:
    """The text in this manner; None where it has no such form."""
    kind, value = manner.kind, manner.value
    if kind in {"upper", "lower"}:
        return text.upper() if kind == "upper" else text.lower()
    if kind == "json":
        return json.dumps({value: text}, ensure_ascii=False)
    if kind in {"bullets", "numbers", "brief"}:
        return _parts(kind, text)
    if "\n" in text:
        return None
    if kind == "pirate":
        return pirate(draw, text)
    if kind == "character":
        return " ".join((CHARACTERS[value][0], text, CHARACTERS[value][1]))
    if kind == "name":
        return called(text, value)
    if kind == "excited":
        return re.sub(r"\.(?= |$)", "!", text)
    return f"{text} {value}" if kind == "end" else f"{value} {text}"


def _parts(kind: str, text: str) -> str | None:
    if "\n" in text:
        return None
    parts = sentences(text)
    if len(parts) < 2:
        return None
    if kind == "brief":
        return parts[0]
    return "\n".join(f"- {p}" if kind == "bullets" else f"{n}. {p}" for n, p in enumerate(parts, 1))


def pirate(draw: Draw, text: str) -> str:
    """The text as a pirate would say it."""
    body = _WORD.sub(lambda m: _PIRATE_WORDS.get(m[0], m[0]), text).rstrip(".!")
    if body.endswith("?"):
        return f"{draw.pick(PIRATE_OPENINGS)} {body}"
    return f"{draw.pick(PIRATE_OPENINGS)} {body}, {draw.pick(_PIRATE_CLOSINGS)}!"


def called(text: str, name: str) -> str:
    """The text with the name of who is spoken to: after a greeting, or else at the end."""
    greeted = _HELLO.sub(lambda m: f"{m[0]}, {name}", text)
    if greeted != text:
        return greeted
    return f"{text[:-1]}, {name}{text[-1]}" if text[-1] in ".!?" else f"{text}, {name}"


def follows(manner: Manner, text: str) -> bool:
    """Whether a text is in this manner."""
    kind, value = manner.kind, manner.value
    if kind in {"upper", "lower"}:
        return bool(text) and text == (text.upper() if kind == "upper" else text.lower())
    if kind == "json":
        return _is_json(text, value)
    if kind == "brief":
        return len(_SENTENCE_END.findall(text)) == 1 and len(text) <= BRIEF
    if kind in {"bullets", "numbers"}:
        lines = text.split("\n")
        starts = ["- " if kind == "bullets" else f"{n}. " for n in range(1, len(lines) + 1)]
        return len(lines) > 1 and all(map(str.startswith, lines, starts))
    if kind == "excited":
        return text.endswith(("!", "?")) and not re.search(r"\. ", text)
    # The rest also holds in capitals or lower case, where a second wish asks for that.
    text, value = text.lower(), value.lower()
    if kind == "pirate":
        return text.startswith(tuple(o.lower() for o in PIRATE_OPENINGS)) and text[-1:] in {"!", "?"}
    if kind == "character":
        opening, closing = CHARACTERS[value]
        return text.startswith(opening.lower()) and text.endswith(closing.lower())
    if kind == "name":
        return value in text
    return text.endswith(value) if kind == "end" else text.startswith(value)


def _is_json(text: str, key: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == [key] and isinstance(value[key], str)
