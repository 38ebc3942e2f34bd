"""How people type a request: many wordings from one pattern, and the noise of real keyboards on top.

A pattern offers alternatives: "(What is|What's) {term}[, please]?" has four forms; brackets may nest, "[x]" may be left
out, and a bracket of the text has a backslash before it. `ask` draws a form, fills its slots and types it as somebody
would: in lower case, in capitals, without marks, with typos. Slots given as `kept` hold text that the answer must copy,
so no noise touches them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from .draw import Draw
from .words import NAMES

# A node is literal text, or a choice among sequences of nodes.
Node = str | tuple[tuple["Node", ...], ...]

_CLEAN = 0.58  # of the requests are typed with care
_TYPO = 0.3  # of the others have a typo
_ABBREVIATION = 0.12  # of the others write "u" and "pls"
_GREETING = 0.04
_THANKS = 0.03
_ABBREVIATIONS = {
    "you": "u", "your": "ur", "please": "pls", "are": "r", "what's": "whats", "don't": "dont", "can't": "cant", "i'm": "im",
    "thanks": "thx", "because": "cuz", "and": "&", "to": "2", "for": "4", "how's": "hows", "it's": "its", "want to": "wanna",
}  # fmt: skip
_NEIGHBOURS = {
    "a": "sq", "b": "vn", "c": "xv", "d": "sf", "e": "wr", "f": "dg", "g": "fh", "h": "gj", "i": "uo", "j": "hk", "k": "jl", "l": "k",
    "m": "n", "n": "bm", "o": "ip", "p": "o", "q": "wa", "r": "et", "s": "ad", "t": "ry", "u": "yi", "v": "cb", "w": "qe", "x": "zc",
    "y": "tu", "z": "x",
}  # fmt: skip
_SLOT = re.compile(r"\{(\w+)\}")
# Spaces at the end, or before a space, or before a mark that ends something.
_SPARE = re.compile(r" +(?= |[.,?!](?![\w.])|$)")
_WORD = re.compile(r"[A-Za-z]{4,}")


@cache
def parse(pattern: str) -> tuple[Node, ...]:
    """The nodes of a pattern. Raises ValueError where its brackets don't match."""
    nodes, at = _sequence(pattern, 0, "")
    if at != len(pattern):
        raise ValueError(f"pattern: a bracket too many at {at} in {pattern!r}")
    return nodes


def _sequence(pattern: str, at: int, ends: str) -> tuple[tuple[Node, ...], int]:
    """Nodes up to one of the characters `ends` (or the end of the pattern), and where that is."""
    nodes: list[Node] = []
    text = ""
    while at < len(pattern) and pattern[at] not in ends:
        mark = pattern[at]
        if mark == "\\" and pattern[at + 1 : at + 2] in set("()[]|"):
            at += 1
            text += pattern[at]
        elif mark in "([":
            choices: list[tuple[Node, ...]] = [()] if mark == "[" else []
            close = "]" if mark == "[" else ")"
            while True:
                option, at = _sequence(pattern, at + 1, "|" + close)
                choices.append(option)
                if at == len(pattern):
                    raise ValueError(f"pattern: {mark!r} is not closed in {pattern!r}")
                if pattern[at] == close:
                    break
            nodes += [text, tuple(choices)] if text else [tuple(choices)]
            text = ""
        elif mark in ")]":
            break
        else:
            text += mark
        at += 1
    return (*nodes, text) if text else tuple(nodes), at


def expand(draw: Draw, pattern: str) -> str:
    """One of the pattern's forms; slots stay. What is left out leaves no double space."""
    return tidy(_expanded(draw, parse(pattern)))


def _expanded(draw: Draw, nodes: tuple[Node, ...]) -> str:
    return "".join(n if isinstance(n, str) else _expanded(draw, draw.pick(n)) for n in nodes)


def word(draw: Draw, patterns: str | tuple[str, ...], **slots: str) -> str:
    """One form of one of the patterns with its slots filled, typed with care: for answers and texts."""
    pattern = patterns if isinstance(patterns, str) else draw.pick(patterns)
    return expand(draw, pattern).format_map(slots)


def ask(
    draw: Draw, patterns: str | tuple[str, ...], kept: Mapping[str, str] | None = None, **slots: str
) -> str:
    """One form of one of the patterns as people type it. Slots in `kept` appear unchanged; others share the noise."""
    pattern = patterns if isinstance(patterns, str) else draw.pick(patterns)
    kept = kept or {}
    form = expand(draw, pattern)
    form = _SLOT.sub(lambda m: m[0] if m[1] in kept else slots[m[1]], form)
    return typed(draw, _SLOT.split(form), kept)


def typed(
    draw: Draw, parts: list[str], kept: Mapping[str, str] | None = None, *, courtesy: bool = True
) -> str:
    """Text as somebody types it. `parts` alternate: text, name of a kept slot, text, …

    Without `courtesy` no greeting comes before it and no thanks after it.
    """
    kept = kept or {}
    texts = list(parts[::2])
    if courtesy and draw.chance(_GREETING):
        greeting = draw.pick(
            ("Hi, ", "Hello, ", "Hey, ", "Hi! ", "Hello! ", "hey ", "ok, ", "Quick question: ", "So, ")
        )
        texts[0] = greeting + (_uncapitalised(texts[0]) if greeting[-2] in ",ykn:" else texts[0])
    if courtesy and draw.chance(_THANKS) and texts[-1][-1:] in ".?!":
        texts[-1] += draw.pick((" Thanks!", " Thanks.", " Thank you!", " please", " thx"))
    if not draw.chance(_CLEAN):
        texts = _careless(draw, texts)
    out = [texts[0]]
    for name, text in zip(parts[1::2], texts[1:], strict=True):
        out += [kept[name], text]
    return "".join(out)


def _careless(draw: Draw, texts: list[str]) -> list[str]:
    form = draw.weighted(
        (("lower", 0.3), ("lower, no marks", 0.28), ("no marks", 0.12), ("first", 0.13), ("upper", 0.17))
    )
    if draw.chance(_ABBREVIATION):
        texts = [_abbreviated(draw, t) for t in texts]
    if draw.chance(_TYPO):
        texts = _mistyped(draw, texts)
    if "lower" in form:
        texts = [t.lower() for t in texts]
    if form == "upper":
        texts = [t.upper() for t in texts]
    if form == "first":
        texts[0] = _uncapitalised(texts[0])
    if "no marks" in form:
        texts = [t.replace("'", "") if draw.chance(0.5) else t for t in texts]
        texts[-1] = texts[-1].rstrip(".?!")
    elif texts[-1][-1:] in {"?", "!"} and draw.chance(0.08):
        texts[-1] += texts[-1][-1] * draw.between(1, 2)
    return texts


def tidy(text: str) -> str:
    """The text without the spaces that parts left out leave behind."""
    return _SPARE.sub("", text.lstrip(" "))


def plain(text: str) -> str:
    """The text without what typing may change: letters and digits in lower case. Names a wording in its split."""
    return " ".join(re.sub(r"[\W_]+", " ", text.lower().replace("'", "")).split()) or text


def _uncapitalised(text: str) -> str:
    first = re.split(r"[ ,.?!']", text, maxsplit=1)[0]
    keep = first in NAMES or first == "I" or (len(first) > 1 and first != first.capitalize())
    return text if keep or not text else text[0].lower() + text[1:]


def _abbreviated(draw: Draw, text: str) -> str:
    for long, short in _ABBREVIATIONS.items():
        if draw.chance(0.6):
            text = re.sub(rf"\b{long}\b", short, text, flags=re.IGNORECASE)
    return text


def _mistyped(draw: Draw, texts: list[str]) -> list[str]:
    """One or two words of four letters or more with a letter swapped, dropped, doubled or hit beside its key."""
    texts = list(texts)
    for _ in range(draw.weighted(((1, 0.75), (2, 0.25)))):
        places = [(i, m.start(), m.end()) for i, text in enumerate(texts) for m in _WORD.finditer(text)]
        if not places:
            break
        i, start, end = draw.pick(places)
        texts[i] = texts[i][:start] + _typo(draw, texts[i][start:end]) + texts[i][end:]
    return texts


def _typo(draw: Draw, name: str) -> str:
    at = draw.between(1, len(name) - 2)
    kind = draw.pick(("swap", "drop", "double", "beside"))
    if kind == "swap":
        return name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    if kind == "drop":
        return name[:at] + name[at + 1 :]
    if kind == "double":
        return name[: at + 1] + name[at:]
    return name[:at] + draw.pick(_NEIGHBOURS.get(name[at].lower(), name[at])) + name[at + 1 :]
