"""Questions and answers about the terms of LLM inference."""

from __future__ import annotations

from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .glossary_facts import ENTRIES, QUESTIONS, Entry
from .words import casual

_FULL = (
    "What is {t}?", "What does {t} mean?", "Explain {t}.", "Define {t}.", "Tell me about {t}.", "{t}?",
    "Can you explain {t} to me?", "What is meant by {t}?", "I keep reading about {t}. What is it?",
    "In LLM serving, what is {t}?", "What do people mean by {t}?", "Please explain {t}.", "What's {t}?",
    "Do you know what {t} is?", "How would you explain {t} to a beginner?", "I am new to inference. What is {t}?",
    "Could you tell me what {t} means?", "What is {t} in LLM inference?", "Describe {t}.", "Help me understand {t}.",
)  # fmt: skip
_SHORT = (
    "Explain {t} in one sentence.", "What is {t}? One sentence, please.", "Define {t} briefly.",
    "Give me a short definition of {t}.", "In one sentence, what is {t}?", "What is {t}, in short?",
    "Summarize {t} in one sentence.", "Briefly, what does {t} mean?",
)  # fmt: skip


def question(draw: Draw) -> list[Turn]:
    """One question about a term; the pair of term and wording belongs to one split."""
    if draw.chance(0.25):
        pairs = [(special, ask) for special in QUESTIONS for ask in special.asks]
        special, ask = draw.held(lambda: draw.pick(pairs), lambda p: f"glossary|{p[1]}")
        return [user(casual(draw, ask)), assistant(special.answer, _check(special.must, "question"))]
    short = draw.chance(0.3)

    def make() -> tuple[Entry, str]:
        entry = draw.pick(ENTRIES)
        return entry, draw.pick(_SHORT if short else _FULL).format(t=draw.pick(entry.names))

    entry, ask = draw.held(make, lambda p: f"glossary|{p[1]}")
    said = entry.short if short else f"{entry.short} {entry.more}"
    ask = ask[0].upper() + ask[1:]
    return [user(casual(draw, ask)), assistant(said, _check(entry.must, "one sentence" if short else "term"))]


def _check(must: tuple[str, ...], task: str) -> Check:
    return Check("contains", {"all": list(must), "task": task})


def document(draw: Draw) -> str:
    """A plain paragraph about a few terms."""
    entries = draw.held(lambda: draw.sample(ENTRIES, 3), lambda e: "notes:" + "|".join(x.names[0] for x in e))
    return " ".join(f"{e.short} {e.more}" for e in entries)


def make(draw: Draw) -> Conversation:
    """One to three questions."""
    turns: list[Turn] = []
    for _ in range(draw.weighted(((1, 0.8), (2, 0.15), (3, 0.05)))):
        turns += question(draw)
    return Conversation("glossary", turns)
