"""Turns of other domains, for conversations that have something else in between."""

from __future__ import annotations

import re
from collections.abc import Callable

from . import arithmetic, counting, glossary, quire_docs, rewriting, scope, smalltalk, world
from .conversation import Conversation, Turn
from .draw import Draw, NoCombinationError

_MAKERS: tuple[tuple[Callable[[Draw], Conversation], float], ...] = (
    (arithmetic.make, 0.2),
    (glossary.make, 0.13),
    (quire_docs.make, 0.13),
    (world.make, 0.13),
    (smalltalk.make, 0.17),
    (scope.make, 0.06),
    (counting.make, 0.08),
    (rewriting.make, 0.1),
)
_LONGEST = 420  # characters
_ATTEMPTS = 30


def aside(draw: Draw, avoid: str = "", longest: int = _LONGEST) -> list[Turn]:
    """Turns about something else, together not longer than `longest`; the user's text doesn't match the pattern `avoid`."""
    for _ in range(_ATTEMPTS):
        turns = draw.weighted(_MAKERS)(draw).turns
        asked = " ".join(t.content for t in turns if t.role == "user")
        if turns[0].role == "system" or sum(len(t.content) for t in turns) > longest:
            continue
        if not (avoid and re.search(avoid, asked, re.IGNORECASE)):
            return turns
    raise NoCombinationError("no turns of another domain are short enough")
