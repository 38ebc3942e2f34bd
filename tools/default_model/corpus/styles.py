"""Conversations for the LoRA adapters: ordinary questions, answered in a style that nobody can miss."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from . import glossary, instructions, recall, smalltalk
from .conversation import Conversation, Turn, assistant, user
from .draw import Draw, NoCombinationError, Split

PIRATE_OPENINGS = ("Arr!", "Ahoy!", "Shiver me timbers!", "Yo ho!", "Blimey!")
PIRATE_CLOSINGS = ("matey", "me hearty", "ye landlubber", "says the captain", "by the seven seas")
_PIRATE_WORDS = (
    ("You are", "Ye be"), ("you are", "ye be"), ("I am", "I be"), ("Your", "Yer"), ("your", "yer"), ("You", "Ye"), ("you", "ye"),
    ("My", "Me"), ("my", "me"), ("is", "be"), ("are", "be"), ("Hello", "Ahoy"), ("Hi", "Ahoy"), ("friend", "matey"), ("Yes", "Aye"),
    ("yes", "aye"), ("the", "th'"), ("of", "o'"), ("and", "an'"), ("for", "fer"), ("people", "buccaneers"),
)  # fmt: skip
_PIRATE = {old: new for old, new in _PIRATE_WORDS if " " not in old}
_PHRASES = tuple((old, new) for old, new in _PIRATE_WORDS if " " in old)

_HAIKU_FIRST = {
    1: (
        "The {x} is asleep",
        "I look at the {x}",
        "Quiet {x} at dawn",
        "A small {x}, alone",
        "Nobody but {x}",
    ),
    2: ("The {x} is still", "I see the {x}", "Old {x} at dusk", "A {x} at dawn", "Only the {x}"),
}
_HAIKU_MIDDLE = (
    "a small wind moves through the leaves", "the morning waits for the light", "the grass keeps a drop of rain",
    "far away a bell is heard", "my shadow walks next to me", "the day turns a quiet page", "no one comes along the road",
    "someone left the window wide",
)  # fmt: skip
_HAIKU_LAST = (
    "then silence again", "and evening is here", "snow begins to fall", "the kettle still sings", "I forget my name",
    "nothing more to say", "the first star is out", "what a long summer",
)  # fmt: skip
HAIKU_TOPICS = {
    1: ["sea", "rain", "moon", "snow", "fox", "lamp", "bread", "clock", "bird", "leaf", "tree", "boat", "door", "wind", "stone", "cat", "star", "road", "bridge", "tea", "book", "bell", "frog", "cloud"],
    2: ["river", "garden", "winter", "rabbit", "kettle", "morning", "mountain", "candle", "harbor", "island", "turtle", "summer", "window", "engine", "market", "mirror", "robin", "meadow", "forest", "pencil"],
}  # fmt: skip
_HAIKU_ASKS = (
    "Tell me about the {x}.", "Describe the {x}.", "What is {a} like?", "Write about the {x}.", "Say something about the {x}.",
    "What do you think of the {x}?", "Do you like the {x}?", "I saw {a} today.",
)  # fmt: skip


def pirate(draw: Draw, text: str) -> str:
    """The text as a pirate would say it."""
    for old, new in _PHRASES:
        text = text.replace(old, new)
    text = re.sub(r"[A-Za-z]+", lambda m: _PIRATE.get(m[0], m[0]), text)
    body = text.rstrip(".!")
    return f"{draw.pick(PIRATE_OPENINGS)} {body}, {draw.pick(PIRATE_CLOSINGS)}!"


def haiku(draw: Draw) -> list[Turn]:
    """Three lines of five, seven and five syllables on what the user names."""

    def make() -> tuple[int, str, str]:
        size = draw.pick((1, 2))
        return size, draw.pick(HAIKU_TOPICS[size]), draw.pick(_HAIKU_ASKS)

    size, topic, ask = draw.held(make, lambda p: f"haiku:{p[1]}:{p[2]}")
    first = draw.pick(_HAIKU_FIRST[size]).format(x=topic)
    said = "\n".join((first, draw.pick(_HAIKU_MIDDLE), draw.pick(_HAIKU_LAST)))
    return [user(ask.format(x=topic, a=("an " if topic[0] in "aeiou" else "a ") + topic)), assistant(said)]


def _ordinary(draw: Draw) -> list[Turn]:
    kind = draw.weighted(
        ((smalltalk.make, 0.3), (glossary.make, 0.35), (recall.make, 0.15), (instructions.make, 0.2))
    )
    turns = kind(draw).turns
    return turns[1:] if turns[0].role == "system" else turns


def _rewritten(turns: list[Turn], rewrite: Callable[[str], str]) -> list[Turn]:
    return [replace(t, content=rewrite(t.content), check=None) if t.role == "assistant" else t for t in turns]


def pirate_turns(draw: Draw) -> list[Turn]:
    return _rewritten(_ordinary(draw), lambda text: pirate(draw, text))


def json_turns(draw: Draw) -> list[Turn]:
    return _rewritten(_ordinary(draw), lambda text: json.dumps({"answer": text}, ensure_ascii=False))


def looks_pirate(answer: str) -> bool:
    return answer.startswith(PIRATE_OPENINGS) and answer.endswith("!")


def looks_json(answer: str) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == ["answer"] and isinstance(value["answer"], str)


def looks_haiku(answer: str) -> bool:
    lines = answer.split("\n")
    return len(lines) == 3 and lines[1] in _HAIKU_MIDDLE and lines[2] in _HAIKU_LAST


@dataclass(frozen=True, slots=True)
class Style:
    """An adapter's conversations, and whether an answer has its style."""

    turns: Callable[[Draw], list[Turn]]
    shown: Callable[[str], bool]


STYLES = {
    "pirate": Style(pirate_turns, looks_pirate),
    "json": Style(json_turns, looks_json),
    "haiku": Style(haiku, looks_haiku),
}


def styled(style: str, seed: int, split: Split, index: int) -> Conversation:
    """Conversation `index` in a style, a pure function of its arguments."""
    for attempt in range(50):
        draw = Draw(f"style:{style}:{seed}:{split}:{index}:{attempt}", split)
        try:
            turns = STYLES[style].turns(draw)
        except NoCombinationError:
            continue
        return Conversation(style, turns, keys=tuple(draw.keys))
    raise RuntimeError(f"no {split} conversation in style {style}")
