"""Plain text without a chat: what a raw prompt such as "Hello, my name is" goes on with."""

from __future__ import annotations

import re

from . import grammar
from .draw import Draw
from .words import CITIES, GIRLS, NAMES, SURNAMES, invented

# Of the texts begin in lower case, as raw prompts often do; fewer are in lower case throughout.
_UNCAPITALISED = 0.12
_LOWER = 0.06
# How two people speak in writing: before the first, between them, after the second.
_SPEAKERS = (
    ("A: ", "\nB: ", ""), ("{n}: ", "\n{f}: ", ""), ('"', '" {n} said.\n"', '" {f} said.'), ("- ", "\n- ", ""),
    ('"', '"\n"', '"'), ("Q: ", "\nA: ", ""), ("", "\n", ""), ("{n}:\n", "\n{f}:\n", ""),
)  # fmt: skip


def people(draw: Draw) -> dict[str, str]:
    """Names and pronouns of two people and where they live; the combination belongs to one split."""

    def make() -> dict[str, str]:
        name, friend = draw.sample(NAMES, 2)
        return {"name": name, "friend": friend, "city": draw.pick(CITIES), "town": invented(draw)}

    slots = draw.held(make, lambda s: "text:" + ":".join(s.values()))
    he, him, his = pronouns(slots["name"])
    speakers = (part.format(n=slots["name"], f=slots["friend"]) for part in draw.pick(_SPEAKERS))
    slots |= dict(zip("sme", speakers, strict=True))
    return slots | {"he": he, "him": him, "his": his, "surname": draw.pick(SURNAMES)}


def pronouns(name: str) -> tuple[str, str, str]:
    return ("she", "her", "her") if name in GIRLS else ("he", "him", "his")


def document(draw: Draw) -> str:
    """One text: a greeting, a day, a letter, a dialogue, a list, a few lines of code, a single sentence, …"""
    text = grammar.load("texts").text(draw, "document", **people(draw))
    if draw.chance(_LOWER):
        return text.lower()
    keep = re.split(r"\W", text, maxsplit=1)[0] in {*NAMES, "I", "A", "Q"}
    return text[0].lower() + text[1:] if draw.chance(_UNCAPITALISED) and not keep else text
