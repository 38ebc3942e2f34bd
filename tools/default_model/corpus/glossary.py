"""Questions and answers about the terms of LLM inference."""

from __future__ import annotations

from functools import cache

from . import faq, sheets
from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .sheets import Subject
from .wording import ask, expand, plain, typed
from .words import invented

QUESTIONS = ("inference", "inference_truths")
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
    return frozenset(plain(a) for entry in faq.urn(*QUESTIONS) for a in entry.asks if "differ" in a)


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
    name = invented(draw, draw.between(2, 3))
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


_BILLIONS = (
    "0.5", "0.6", "1", "1.5", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16", "18", "20", "22", "24",
    "26", "27", "30", "32", "34", "35", "36", "40", "46", "50", "56", "60", "65", "70", "72", "80", "90", "100", "104", "110", "120",
    "123", "130", "141", "150", "180", "200", "235", "250", "300", "400", "405", "500",
)  # fmt: skip
_BITS = {
    16: ("(16 bits|16 bit|fp16|bf16|bfloat16|float16)", "two bytes", 2.0), 8: ("(8 bits|8 bit|int8|fp8)", "one byte", 1.0),
    4: ("(4 bits|4 bit|int4)", "half a byte", 0.5), 32: ("(32 bits|float32|fp32)", "four bytes", 4.0),
}  # fmt: skip
_SIZE = (
    "How (much memory|much RAM|much VRAM|many GB) does a {b}B model (need|take|use) in {bits}[?]",
    "(How big|How large|what size) is a {b}B model in {bits}[?]", "{b}B (model|) in {bits}[?]", "memory (of|for) a {b}B model in {bits}[?]",
    "(Does|Will) a {b}B model in {bits} fit (in my memory|on my machine)[?]", "(weights|weight size) of a {b}b model in {bits}[?]",
    "I want to run a {b}B model in {bits}. How much memory do I need?", "{b} billion parameters in {bits}, how (much memory|many GB)[?]",
)  # fmt: skip
_SIZE_PLAIN = (
    "How (much memory|much RAM|much VRAM|many GB) does a {b}B model (need|take|use)[?]", "(How big|How large) is a {b}B model[?]",
    "{b}b (memory|size|ram|vram)[?]", "memory (of|for) a {b}B model[?]",
)  # fmt: skip


def _weights(draw: Draw) -> list[Turn]:
    """The memory of a model's weights."""
    size = draw.weighted(((16, 0.4), (8, 0.25), (4, 0.25), (32, 0.1)))
    bits, each, size_in_bytes = _BITS[size]

    def make() -> tuple[str, str]:
        patterns = _SIZE_PLAIN if size == 16 and draw.chance(0.5) else _SIZE
        return draw.pick(_BILLIONS), expand(draw, draw.pick(patterns).replace("{bits}", bits))

    billions, asked = draw.held(make, lambda p: f"weights|{plain(p[1])}|{p[0]}")
    total = f"{float(billions) * size_in_bytes:g} GB"
    said = f"About {total} for the weights in {size} bits: {billions} billion parameters times {each}. The KV cache comes on top."
    check = Check("contains", {"all": [total], "task": "memory of weights"})
    parts = asked.replace("}", "{").split("{")
    return [user(typed(draw, parts, {"b": billions})), assistant(said, check)]


def definition(draw: Draw) -> tuple[str, str]:
    """A name of a term, and one sentence that defines it."""
    sheet = sheets.load(*TERMS)
    subject = draw.pick(sheet.urn)
    return draw.pick(subject.names), sheets.compose(draw, sheet.kind("term in one sentence"), subject)[0]


def question(draw: Draw) -> list[Turn]:
    """One question, now and then with another about the same term."""
    kind = draw.weighted(
        (("faq", 0.28), ("pair", 0.05), ("unknown", 0.05), ("weights", 0.04), ("term", 0.58))
    )
    if kind == "faq":
        return faq.question(draw, faq.urn(*QUESTIONS), "inference")
    if kind == "term":
        return sheets.questions(draw, "term", sheets.load(*TERMS))
    return {"pair": _pair, "unknown": _unknown, "weights": _weights}[kind](draw)


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
