"""Questions and answers about the terms of LLM inference."""

from __future__ import annotations

from functools import cache

from . import faq, sheets
from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .sheets import Subject
from .wording import ask, expand, plain, typed
from .words import invented

TERMS = ("term_kinds", "terms_speed", "terms_memory", "terms_models")
_KINDS = (
    "batching",
    "cache",
    "attention",
    "decoding",
    "sampling",
    "parallelism",
    "quantization",
    "scheduling",
    "tokens",
)
_PAIR = (
    "(What is the difference between|What's the difference between|Compare|difference between|Explain) {a} and {b}[?]",
    "{a} (vs|vs.|versus|or|and|compared to) {b}[?]", "How (do|does) {a} (differ from|compare to|relate to) {b}[?]",
    "(What are|what are|Explain|Define|tell me about|What do these mean:) {a} and {b}[?]",
    "(Is|are) {a} (the same as|related to|a kind of) {b}[?]", "I mix up {a} and {b}[. Please explain|. Help me][.]",
)  # fmt: skip
_UNKNOWN = (
    "(What is|What's|Explain|Define|what does|tell me about) {term}[?]", "{term}[?]", "What does {term} (mean|stand for)[?]",
    "(What is|what's) {term} in (LLM inference|Quire|LLM serving|inference)[?]", "how does {term} work[?]",
    "(I read about|I keep hearing about|Do you know) {term}. What is it?", "why does {term} matter[?]",
    "(Does Quire|can quire) (have|use|support|do) {term}[?]", "(and|what about) {term}[?]", "meaning of {term}[?]",
)  # fmt: skip
_SORRY = (
    "I don't know {term}. (I know|Ask me about) terms such as TTFT, the KV cache and batching.",
    "I don't know the term {term}, and I'd rather not guess.",
    "{term} is not a term I know, so I don't know what it means.",
)


@cache
def _explained() -> frozenset[str]:
    """Hand-written questions about the difference of two terms."""
    return frozenset(plain(a) for entry in faq.load("inference") for a in entry.asks if "differ" in a)


def _pair(draw: Draw) -> list[Turn]:
    """Two terms side by side."""
    sheet = sheets.load(*TERMS)

    def make() -> tuple[Subject, Subject]:
        a, b = draw.sample(sheet.urn, 2)
        return a, b

    a, b = draw.held(make, lambda p: f"pair|{p[0].names[0]}|{p[1].names[0]}")
    if a is b or any(all(any(plain(n) in e for n in s.names) for s in (a, b)) for e in _explained()):
        return sheets.questions(draw, "term", sheet)
    asked = ask(draw, _PAIR, a=draw.pick(a.names), b=draw.pick(b.names))
    (one, must), (other, too) = (sheets.compose(draw, sheet.kind("what about a term"), s) for s in (a, b))
    check = Check("contains", {"all": [*must, *too], "task": "two terms"})
    return [user(asked), assistant(f"{one} {other}", check)]


def _unknown(draw: Draw) -> list[Turn]:
    """A term that does not exist."""
    name = invented(draw, draw.between(1, 3))
    term = draw.pick(
        (name, name.lower(), name.upper(), f"{name}-{invented(draw)}", f"{name} {draw.pick(_KINDS)}")
    )
    term, pattern = draw.held(
        lambda: (term, expand(draw, draw.pick(_UNKNOWN))), lambda p: f"unknown|{plain(p[0] + p[1])}"
    )
    check = Check("contains", {"all": ["don't know", term], "task": "unknown term"})
    said = expand(draw, draw.pick(_SORRY)).format(term=term)
    parts = [p for text in pattern.split("{term}") for p in ("term", text)][1:]
    return [user(typed(draw, parts, {"term": term})), assistant(said, check)]


def definition(draw: Draw) -> tuple[str, str]:
    """A name of a term, and one sentence that defines it."""
    sheet = sheets.load(*TERMS)
    subject = draw.pick(sheet.urn)
    return draw.pick(subject.names), sheets.compose(draw, sheet.kind("term in one sentence"), subject)[0]


def question(draw: Draw) -> list[Turn]:
    """One question, now and then with another about the same term."""
    kind = draw.weighted((("faq", 0.27), ("pair", 0.06), ("unknown", 0.06), ("term", 0.61)))
    if kind == "faq":
        return faq.question(draw, faq.load("inference"), "inference")
    if kind == "term":
        return sheets.questions(draw, "term", sheets.load(*TERMS))
    return _pair(draw) if kind == "pair" else _unknown(draw)


def document(draw: Draw) -> str:
    """A plain text about a few terms."""
    return sheets.text(
        draw, sheets.load(*TERMS), ("Notes on LLM inference", "Terms of LLM serving", "Glossary")
    )


def make(draw: Draw) -> Conversation:
    """One to three questions."""
    turns = question(draw)
    for _ in range(draw.weighted(((0, 0.8), (1, 0.15), (2, 0.05)))):
        if draw.chance(0.5):
            turns += sheets.questions(draw, "term", sheets.load(*TERMS), "what about a term")
        else:
            turns += question(draw)
    return Conversation("glossary", turns)
