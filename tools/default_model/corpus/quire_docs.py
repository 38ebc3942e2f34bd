"""Questions and answers about Quire: its commands, options, parameters, metrics, errors and models."""

from __future__ import annotations

from . import faq, quire_commands, sheets
from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .wording import ask, word
from .words import invented

# Files, topic and share.
SHEETS: tuple[tuple[tuple[str, ...], str, float], ...] = (
    (("option_kinds", "options"), "option", 0.22),
    (("parameter_kinds", "parameters"), "parameter", 0.1),
    (("metric_kinds", "metrics"), "metric", 0.1),
    (("command_kinds", "commands"), "command", 0.15),
    (("error_kinds", "errors"), "error", 0.05),
    (("family_kinds", "families"), "model", 0.04),
    (("quire_first",), "quire", 0.17),
    (("quire", "quire_small", "quire_more"), "quire", 0.25),
    ((), "command line", 0.12),
    ((), "unknown", 0.03),
)
_WORDS = ("max", "enable", "num", "cache", "kv", "model", "gpu", "batch", "use", "no", "log", "size")


_UNKNOWN = (
    "What (does|is) {term} [do][?]", "{term}[?]", "(Explain|Tell me about) {term}[.]", "What is {term} for[?]",
    "(Is there|Do you have) an option {term}[?]", "what does the option {term} do[?]", "default of {term}[?]",
)  # fmt: skip
_SORRY = (
    "I don't know {term}. quire help serve lists all options.", "I don't know an option {term}; quire help serve lists them all.",
    "{term} is not an option that I know, so I don't know what it does. Try quire help serve.",
)  # fmt: skip


def _unknown(draw: Draw) -> list[Turn]:
    """An option that does not exist."""
    words = [
        invented(draw).lower() if draw.chance(0.5) else draw.pick(_WORDS) for _ in range(draw.between(1, 2))
    ]
    term = draw.held(lambda: f"--{'-'.join([*words, invented(draw).lower()])}", str)
    check = Check("contains", {"all": ["don't know", term], "task": "unknown option"})
    return [user(ask(draw, _UNKNOWN, {"term": term})), assistant(word(draw, _SORRY, term=term), check)]


def question(draw: Draw, *, about: bool = False) -> list[Turn]:
    """One question, now and then with another about the same; with `about`, like "and --port?"."""
    files, topic, _ = draw.weighted([(sheet, sheet[2]) for sheet in SHEETS])
    if topic == "quire":
        return faq.question(draw, faq.urn(*files), topic)
    if files:
        sheet = sheets.load(*files)
        short = [k.name for k in sheet.kinds if k.name.startswith("what about")]
        return sheets.questions(draw, topic, sheet, draw.pick(short) if short and about else "")
    return quire_commands.question(draw) if topic == "command line" else _unknown(draw)


def document(draw: Draw) -> str:
    """A plain text about a few options, commands, metrics or parameters."""
    files, topic, _ = draw.pick(SHEETS[:6])
    return sheets.text(draw, sheets.load(*files), (f"Notes on Quire: {topic}s", "Quire", "How to use Quire"))


def make(draw: Draw) -> Conversation:
    """One to three questions."""
    turns = question(draw)
    for _ in range(draw.weighted(((0, 0.82), (1, 0.14), (2, 0.04)))):
        turns += question(draw, about=draw.chance(0.5))
    return Conversation("quire", turns)
