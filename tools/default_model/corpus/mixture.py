"""The mixture of domains: conversation `index` of a split is a pure function of seed, split and index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import (
    arithmetic,
    counting,
    extraction,
    glossary,
    instructions,
    recall,
    rewriting,
    smalltalk,
    stories,
    tool_calls,
)  # fmt: skip
from .conversation import Conversation, Turn, system
from .draw import Draw, NoCombinationError, Split

# Raised when a change makes different text from the same seed.
GENERATOR_VERSION = 1


@dataclass(frozen=True, slots=True)
class Domain:
    """A maker and its share of the conversations."""

    make: Callable[[Draw], Conversation]
    share: float


DOMAINS = {
    "arithmetic": Domain(arithmetic.make, 0.14),
    "counting": Domain(counting.make, 0.05),
    "extraction": Domain(extraction.make, 0.14),
    "glossary": Domain(glossary.make, 0.09),
    "instructions": Domain(instructions.make, 0.08),
    "recall": Domain(recall.make, 0.07),
    "rewriting": Domain(rewriting.make, 0.09),
    "smalltalk": Domain(smalltalk.make, 0.05),
    "stories": Domain(stories.make, 0.09),
    "tools": Domain(tool_calls.make, 0.11),
}
_SYSTEMS = (
    "You are a helpful assistant.", "You are quire-mini, a small assistant.", "Be brief and helpful.", "You are a friendly assistant.",
    "You are a helpful assistant. Answer the question of the user.", "Help the user as well as you can.",
)  # fmt: skip
_CHAIN = 0.06
_DOCUMENT = 0.02
_SYSTEM = 0.15
_ATTEMPTS = 50


def _redrawn(seed: str, split: Split, make: Callable[[Draw], Conversation]) -> Conversation:
    """The first of the drawings of `seed` that finds combinations of the split for all it needs."""
    for attempt in range(_ATTEMPTS):
        draw = Draw(f"{GENERATOR_VERSION}:{seed}:{attempt}", split)
        try:
            made = make(draw)
        except NoCombinationError:
            continue
        made.keys = tuple(draw.keys)
        return made
    raise RuntimeError(f"no {split} conversation in {_ATTEMPTS} drawings of {seed!r}")


def _pick_domain(draw: Draw) -> str:
    return draw.weighted([(name, domain.share) for name, domain in DOMAINS.items()])


def _chain(draw: Draw) -> Conversation:
    """Several unrelated tasks in one chat: long contexts, and answers that ignore what no longer matters."""
    turns: list[Turn] = []
    for _ in range(draw.between(3, 14)):
        domain = _pick_domain(draw)
        if domain in {"tools", "recall"}:
            continue
        made = DOMAINS[domain].make(draw)
        if made.turns[0].role != "system":
            turns += made.turns
    if not turns:
        turns = smalltalk.greeting(draw)
    return Conversation("chain", turns)


def _document(draw: Draw) -> Conversation:
    text = stories.document(draw) if draw.chance(0.75) else glossary.document(draw)
    return Conversation("document", text=text)


def _any(draw: Draw) -> Conversation:
    kind = draw.weighted(((_chain, _CHAIN), (_document, _DOCUMENT), (None, 1 - _CHAIN - _DOCUMENT)))
    if kind is not None:
        return kind(draw)
    made = DOMAINS[_pick_domain(draw)].make(draw)
    if made.turns[0].role != "system" and draw.chance(_SYSTEM):
        made.turns.insert(0, system(draw.pick(_SYSTEMS)))
    return made


def conversation(seed: int, split: Split, index: int) -> Conversation:
    """Conversation `index` of the split; equal arguments give equal text on every machine."""
    return _redrawn(f"{seed}:{split}:{index}", split, _any)


def stream(seed: int, split: Split, start: int = 0) -> Iterator[Conversation]:
    """Conversations `start`, `start + 1`, … without end."""
    index = start
    while True:
        yield conversation(seed, split, index)
        index += 1


def of_domain(domain: str, seed: int, split: Split, count: int) -> list[Conversation]:
    """`count` conversations of one domain, for evaluation."""
    return [_redrawn(f"{seed}:{split}:{domain}:{i}", split, DOMAINS[domain].make) for i in range(count)]
