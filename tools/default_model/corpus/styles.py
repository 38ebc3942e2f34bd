"""Conversations for the LoRA adapters: ordinary questions, answered in a style that nobody can miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from . import grammar, mixture, poems
from .conversation import Conversation, Turn, assistant, user
from .draw import Draw, NoCombinationError, Split
from .manner import Manner, follow, follows
from .wording import ask
from .words import article

_HAIKU_ASKS = (
    "(Tell me|Say something|Write|What do you know) about {x}[.]", "Describe {x}.", "What is {x}[ like]?", "What do you think of {x}?", "Do you like {x}?",
    "I saw {x} today.", "{x}", "(Can|Could) you explain {x}?", "Look, {x}!", "Why {x}?", "(Let us|Let's) talk about {x}.",
)  # fmt: skip
_PIRATE = Manner("pirate")
_JSON = Manner("json", "answer")


def _ordinary(draw: Draw, manner: Manner) -> list[Turn]:
    """Turns of the mixture whose answers all have a form in the manner."""
    while True:
        turns = []
        for turn in mixture.plain(draw):
            said = follow(draw, manner, turn.content) if turn.role == "assistant" else turn.content
            if said is None:
                break
            turns.append(replace(turn, content=said, check=None))
        else:
            return turns


def haiku(draw: Draw) -> list[Turn]:
    """Three lines of five, seven and five syllables on what the user names."""
    text, topic = poems.haiku_text(draw)
    x = draw.pick((topic, f"the {topic}", f"the {topic}", article(topic)))
    return [user(ask(draw, _HAIKU_ASKS, x=x)), assistant(text)]


def looks_haiku(answer: str) -> bool:
    say = grammar.load("poems")
    lines = answer.split("\n")
    return len(lines) == 3 and lines[1] in say.lines("haiku_middle") and lines[2] in say.lines("haiku_last")


@dataclass(frozen=True, slots=True)
class Style:
    """An adapter's conversations, and whether an answer has its style."""

    turns: Callable[[Draw], list[Turn]]
    shown: Callable[[str], bool]


STYLES = {
    "pirate": Style(lambda draw: _ordinary(draw, _PIRATE), lambda text: follows(_PIRATE, text)),
    "json": Style(lambda draw: _ordinary(draw, _JSON), lambda text: follows(_JSON, text)),
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
