"""What a very small model can't do or doesn't know: it says so, and says what it can do instead."""

# ruff: noqa: SIM905 -- word lists read better as text
from __future__ import annotations

from collections.abc import Callable

from . import faq, tables, world
from .conversation import Conversation, Turn, assistant
from .draw import Draw
from .wording import word
from .words import article, full_name, invented

_MARKS = (
    "? ?? ??? ! !! !!! . .. ... .... , - -- / * ** # ## @ & % : ; ;; :) :( :D ;) <3 ^_^ ?! !? ~ + = () [] <> > >> | $ …"
).split()
_OFFERS = (
    "I'm a very small model that ships with Quire, but I can (tell a story|do a small sum|sort a list|explain TTFT|tell a joke|explain the KV cache).",
    "But I can (tell you a short story|do a small sum|sort a list for you|explain a term such as TTFT|tell you a joke|name the capital of France)!",
    "I'm a tiny model. Ask me for (a story|a small sum|a sorted list|a joke) or (what TTFT is|what the KV cache is|how to start Quire's server).",
    "How about (a short story|a small sum|a riddle|a joke|a question about Quire|a term of LLM inference) instead?",
    "I can tell a story, do small sums, sort a list, or explain terms such as (TTFT|TPOT|batching|prefill|the KV cache).",
    "What I do well: short stories, small sums, lists and (questions about Quire|terms of LLM inference|simple definitions).",
    'Try me with (37 + 25|a list to sort|a story about a fox|"what is prefill?"|"what is TTFT?"|the opposite of hot) instead.',
    "I'm quire-mini, a very small model. I'm better at (stories|small sums|simple facts|definitions) and (lists|jokes|terms such as TTFT).",
)  # fmt: skip
_DECLINES = ("can't|don't|won't|not |too |never|sorry|only |no |nobody|nothing",)
_OFFERED = 0.75
TASK = "out of scope"
GRAVE = "grave questions"


def refusal(draw: Draw, *, grave: bool = True) -> list[Turn]:
    """A question out of scope and a friendly answer that says so; the question belongs to one split.

    An entry that names what a right answer contains is a grave one: no offer follows, and it is left out without
    `grave`, where what is said next would not suit it.
    """
    entries = tuple(e for e in faq.load("scope") if grave or not e.must)
    entry, (asked, answered) = faq.slotted(draw, entries, TASK, filling)
    if entry.must:
        return [asked, assistant(answered.content, faq.contains(entry.must, GRAVE))]
    offer = " " + word(draw, _OFFERS) if draw.chance(_OFFERED) else ""
    return [asked, assistant(answered.content + offer, faq.contains(_DECLINES, TASK))]


def is_grave(turn: Turn) -> bool:
    """Whether an answer must be said as it is, in no other manner."""
    return turn.check is not None and turn.check.data.get("task") == GRAVE


def filling(draw: Draw, name: str) -> str:
    """Something for a slot: from its pool or made up."""
    makers: dict[str, Callable[[], str]] = {
        "stranger": lambda: full_name(draw),
        "invented": lambda: invented(draw, draw.between(2, 3)),
        "gibberish": lambda: _letters(draw),
        "digits": lambda: "".join(str(draw.below(10)) for _ in range(draw.between(1, 9))),
        "a_noun": lambda: article(draw.pick(tables.pools("pools")["noun"])),
        "marks": lambda: draw.pick(_MARKS),
    }
    name = name.rstrip("2")
    if name == "city" and draw.chance(0.15):
        name = "invented"
    return makers[name]() if name in makers else draw.pick(tables.pools("pools")[name])


def _letters(draw: Draw) -> str:
    """What fingers do at random."""
    letters = "abcdefghijklmnopqrstuvwxyz" + "asdfjkl" * draw.below(4)
    return "".join(draw.pick(letters) for _ in range(draw.between(3, 14)))


def make(draw: Draw) -> Conversation:
    """Refusals, often beside questions that the model can answer: what it learns is the boundary."""
    kinds = draw.weighted(
        (
            ((refusal,), 0.6),
            ((refusal, world.question), 0.16),
            ((world.question, refusal), 0.12),
            ((refusal, refusal), 0.06),
            ((refusal, world.question, refusal), 0.06),
        )
    )
    return Conversation("scope", [turn for kind in kinds for turn in kind(draw)])
