"""The mixture of domains: conversation `index` of a split is a pure function of seed, split and index.

python -m tools.default_model.corpus.mixture --sample 2000 prints how much of the text each domain makes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from . import (
    arithmetic,
    counting,
    extraction,
    followups,
    glossary,
    instructions,
    poems,
    practice,
    quire_docs,
    recall,
    rewriting,
    scope,
    smalltalk,
    stories,
    system_prompts,
    texts,
    tool_calls,
    world,
)
from .conversation import Conversation, Turn, system
from .draw import Draw, NoCombinationError, Split
from .wording import plain as unmarked

# Raised when a change makes different text from the same seed.
GENERATOR_VERSION = 11

_CHAIN = 0.04  # of the conversations are several tasks in one chat
_DOCUMENT = 0.06  # are plain text
_NEUTRAL = 0.22  # of those without a system prompt get one that changes nothing
_RESTRICTED = 0.14  # of the conversations of "system prompts" allow one subject only
_ATTEMPTS = 50
_SHIPPED = Path(__file__).parents[3] / "src/quire/models/quire-mini"
_BY_HAND = Path(__file__).parents[1] / "handwritten.txt"
_SHORT = 3  # words of a prompt that everybody types alike, such as "who are you"


@dataclass(frozen=True, slots=True)
class Domain:
    """A maker and its weight in the mixture.

    `alone`: what it makes stays out of chains and of other manners. `personal`: it may ask who the model is, so no
    system prompt that names somebody is put before it.
    """

    make: Callable[[Draw], Conversation]
    weight: float
    alone: bool = False
    personal: bool = False


def _chain(draw: Draw, low: int = 2, high: int = 7) -> Conversation:
    """Several unrelated tasks in one chat: long contexts, and answers that ignore what no longer matters."""
    turns: list[Turn] = []
    for _ in range(draw.between(low, high)):
        made = _of(draw, _JOINED)
        if made.turns[0].role != "system":
            turns += made.turns
    return Conversation("chain", turns or DOMAINS["arithmetic"].make(draw).turns)


def _manners(draw: Draw) -> Conversation:
    """A conversation of another domain, or a short chain, in a manner that a prompt asks for."""
    while True:
        base = _chain(draw, 2, 4) if draw.chance(0.2) else _of(draw, _JOINED)
        made = system_prompts.obeyed(draw, base)
        if made is not None:
            made.domain = "manners"
            return made


def _system_prompts(draw: Draw) -> Conversation:
    if not draw.chance(_RESTRICTED):
        return system_prompts.own(draw)
    allowed = draw.chance(0.35)
    while True:
        made = _of(draw, _ON_SUBJECT if allowed else _OFF_SUBJECT)
        if made.turns[0].role == "user" and len(made.turns) <= 4:
            made = system_prompts.restricted(draw, made, allowed=allowed)
            made.domain = "system prompts"
            return made


# A token of the prompt costs nearly as much as one of the answer, so domains of long prompts weigh less.
DOMAINS = {
    "arithmetic": Domain(arithmetic.make, 0.16),
    "counting": Domain(counting.make, 0.19),
    "extraction": Domain(extraction.make, 0.18),
    "followups": Domain(followups.make, 0.09, personal=True),
    "glossary": Domain(glossary.make, 0.17),
    "instructions": Domain(instructions.make, 0.12),
    "manners": Domain(_manners, 0.07, alone=True, personal=True),
    "poems": Domain(poems.make, 0.02),
    "practice": Domain(practice.make, 0.19, alone=True),
    "quire": Domain(quire_docs.make, 0.16),
    "recall": Domain(recall.make, 0.16, alone=True, personal=True),
    "rewriting": Domain(rewriting.make, 0.45),
    "scope": Domain(scope.make, 0.12, personal=True),
    "smalltalk": Domain(smalltalk.make, 0.22, personal=True),
    "stories": Domain(stories.make, 0.03),
    "system prompts": Domain(_system_prompts, 0.14, alone=True, personal=True),
    "tools": Domain(tool_calls.make, 0.19, alone=True),
    "world": Domain(world.make, 0.4),
}
_JOINED = tuple(name for name, domain in DOMAINS.items() if not domain.alone)
# What a prompt that allows Quire and inference only allows, and what it doesn't.
_ON_SUBJECT = ("quire", "glossary")
_OFF_SUBJECT = ("arithmetic", "counting", "poems", "stories", "world")


def _of(draw: Draw, domains: tuple[str, ...]) -> Conversation:
    """A conversation of one of the domains, each by its weight."""
    name = draw.weighted([(name, DOMAINS[name].weight) for name in domains])
    return DOMAINS[name].make(draw)


def plain(draw: Draw) -> list[Turn]:
    """Turns of one domain without a system prompt, tools, or long answers: what an adapter gives its style to."""
    while True:
        turns = _of(draw, _JOINED).turns
        said = [t.content for t in turns if t.role == "assistant"]
        if any(map(scope.is_grave, turns)):
            continue
        if turns[0].role == "user" and all(0 < len(text) <= 400 and text[0] not in "{[" for text in said):
            return turns


def _written_down(draw: Draw) -> str:
    """A question and its answer as plain text, so that a question without a template is answered too."""
    asks, answers = draw.pick(
        (("Q: ", "A: "), ("User: ", "Assistant: "), ("Question: ", "Answer: "), ("", ""), ("", ""))
    )
    turns = plain(draw)[: 2 if not asks else 4]
    return "\n".join((asks if t.role == "user" else answers) + t.content for t in turns)


_DOCUMENTS: tuple[tuple[Callable[[Draw], str], float], ...] = (
    (texts.document, 0.55),
    (_written_down, 0.13),
    (stories.document, 0.22),
    (poems.document, 0.08),
    (glossary.document, 0.06),
    (quire_docs.document, 0.06),
    (world.document, 0.15),
)


def _document(draw: Draw) -> Conversation:
    return Conversation("document", text=draw.weighted(_DOCUMENTS)(draw))


def _any(draw: Draw) -> Conversation:
    kind = draw.weighted((("chain", _CHAIN), ("document", _DOCUMENT), ("one", 1 - _CHAIN - _DOCUMENT)))
    if kind == "document":
        return _document(draw)
    made = _chain(draw) if kind == "chain" else _of(draw, tuple(DOMAINS))
    if made.turns[0].role != "system" and draw.chance(_NEUTRAL):
        named = made.domain in DOMAINS and not DOMAINS[made.domain].personal
        made.turns.insert(0, system(system_prompts.neutral(draw, named=named)))
    return made


@cache
def _prompts_by_hand() -> frozenset[str]:
    """The longer prompts written by hand, as `wording.plain` has them."""
    asked = (line[6:] for line in _BY_HAND.read_text().splitlines() if line.startswith("user: "))
    known = (unmarked(text.replace("\\n", "\n")) for text in asked)
    return frozenset(text for text in known if len(text.split()) > _SHORT)


def asks_by_hand(made: Conversation) -> bool:
    """Whether a message is one of the longer prompts written by hand, whatever its case and marks."""
    return any(turn.role == "user" and unmarked(turn.content) in _prompts_by_hand() for turn in made.turns)


def _redrawn(seed: str, split: Split, make: Callable[[Draw], Conversation]) -> Conversation:
    """The first of the drawings of `seed` that finds combinations of the split for all it needs."""
    for attempt in range(_ATTEMPTS):
        draw = Draw(f"{GENERATOR_VERSION}:{seed}:{attempt}", split)
        try:
            made = make(draw)
        except NoCombinationError:
            continue
        if split is Split.TRAIN and asks_by_hand(made):
            continue
        made.keys = tuple(draw.keys)
        return made
    raise RuntimeError(f"no {split} conversation in {_ATTEMPTS} drawings of {seed!r}")


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


def table(made: list[Conversation], folder: Path) -> str:
    """Shares of the domains among conversations, tokens and learned tokens, with the tokenizer of a folder."""
    from ..rendering import segments
    from ..tokenizer import load

    tokenizer = load(folder)
    count, text, learned = Counter[str](), Counter[str](), Counter[str]()
    for one in made:
        count[one.domain] += 1
        for segment in segments(one):
            tokens = len(tokenizer.encode(segment.text).ids)
            text[one.domain] += tokens
            learned[one.domain] += tokens if segment.learn else 0
    lines = ["| domain | conversations | tokens | learned tokens | learned in one |", "|---|---|---|---|---|"]
    for name in sorted(count):
        shares = (f"{100 * of[name] / of.total():.1f} %" for of in (count, text, learned))
        lines.append(f"| {name} | {' | '.join(shares)} | {learned[name] / count[name]:.0f} |")
    mean = f"{text.total() / count.total():.0f} tokens a conversation, {learned.total() / count.total():.0f} learned"
    return "\n".join(lines) + f"\n\n{mean}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Shares of the domains in the training text.")
    parser.add_argument("--sample", type=int, default=2000, help="conversations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, default=_SHIPPED, help="a folder with tokenizer.json")
    args = parser.parse_args()
    print(table(list(islice(stream(args.seed, Split.TRAIN), args.sample)), args.tokenizer))


if __name__ == "__main__":
    main()
