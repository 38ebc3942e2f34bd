"""Manners of speaking: the text of an answer made to follow a wish, and whether a text follows it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count, repeat

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
    """A way to answer. `value` is what some ways need: the closing words, the name, the JSON key ("answer" where it is
    empty), the character. The ways "word" and "yes" have no form of every text."""

    kind: str
    value: str = ""


def sentences(text: str) -> list[str]:
    return _SENTENCE.split(text)


def follow(draw: Draw, manner: Manner, text: str) -> str | None:
    """The text in this manner; None where it has no such form."""
    if "\n" in text and manner.kind not in _OF_MANY_LINES:
        return None
    return _FORMS[manner.kind](draw, text, manner.value)


def _parts(kind: str, text: str) -> str | None:
    parts = sentences(text)
    if len(parts) < 2:
        return None
    if kind == "brief":
        return parts[0]
    return "\n".join(f"- {p}" if kind == "bullets" else f"{n}. {p}" for n, p in enumerate(parts, 1))


def _ended(text: str) -> str:
    return text + "." if text[-1].isalnum() else text


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


_OF_MANY_LINES = ("upper", "lower", "json")
_FORMS: dict[str, Callable[[Draw, str, str], str | None]] = {
    "upper": lambda _draw, text, _value: text.upper(),
    "lower": lambda _draw, text, _value: text.lower(),
    "json": lambda _draw, text, value: json.dumps({value or "answer": text}, ensure_ascii=False),
    "pirate": lambda draw, text, _value: pirate(draw, text),
    "character": lambda _draw, text, value: f"{CHARACTERS[value][0]} {_ended(text)} {CHARACTERS[value][1]}",
    "name": lambda _draw, text, value: called(text, value),
    "end": lambda _draw, text, value: f"{_ended(text)} {value}",
    "begin": lambda _draw, text, value: f"{value} {text}",
    "excited": lambda _draw, text, _value: None if '"' in text else re.sub(r"\.(?= |$)", "!", text),
    "brief": lambda _draw, text, _value: _parts("brief", text),
    "bullets": lambda _draw, text, _value: _parts("bullets", text),
    "numbers": lambda _draw, text, _value: _parts("numbers", text),
}


def follows(manner: Manner, text: str) -> bool:
    """Whether a text is in this manner."""
    return bool(text) and _SHOWN[manner.kind](text, manner.value)


def _is_list(text: str, starts: Iterable[str]) -> bool:
    lines = text.split("\n")
    return len(lines) > 1 and all(map(str.startswith, lines, starts))


def _is_character(text: str, value: str) -> bool:
    opening, closing = (said.lower() for said in CHARACTERS[value])
    return text.lower().startswith(opening) and text.lower().endswith(closing)


def _is_pirate(text: str) -> bool:
    return text.lower().startswith(tuple(o.lower() for o in PIRATE_OPENINGS)) and text[-1] in "!?"


def _is_json(text: str, key: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    key = key or "answer"
    return isinstance(value, dict) and list(value) == [key] and isinstance(value[key], str)


# Those of the second half also hold in capitals or lower case, where a second wish asks for that.
_SHOWN: dict[str, Callable[[str, str], bool]] = {
    "upper": lambda text, _value: text == text.upper(),
    "lower": lambda text, _value: text == text.lower(),
    "json": _is_json,
    "word": lambda text, _value: " " not in text,
    "yes": lambda text, _value: text in {"Yes", "No"},
    "brief": lambda text, _value: len(_SENTENCE_END.findall(text)) == 1 and len(text) <= BRIEF,
    "bullets": lambda text, _value: _is_list(text, repeat("- ")),
    "numbers": lambda text, _value: _is_list(text, (f"{n}. " for n in count(1))),
    "excited": lambda text, _value: text.endswith(("!", "?")) and not re.search(r"\. ", text),
    "pirate": lambda text, _value: _is_pirate(text),
    "character": _is_character,
    "name": lambda text, value: value.lower() in text.lower(),
    "end": lambda text, value: text.lower().endswith(value.lower()),
    "begin": lambda text, value: text.lower().startswith(value.lower()),
}
