"""Misses of the prefix cache as text, and the templates behind them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from quire.core.cache_misses import AROUND
from quire.records import dataclass
from quire.steplog.log_rows import Missed

_TIME = re.compile(
    r"\d{1,4}[-:/.T]\d{1,2}"
    r"|\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
)
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}|\b[0-9a-f]{16,}", re.IGNORECASE)
_KEY = re.compile(r'"[^"]{1,64}"\s*:')
TIMESTAMP, IDENTIFIER, NUMBER, KEY_ORDER, SPACES, OTHER = (
    "a date or time", "an identifier", "a number", "the order of JSON keys", "white space", "text"
)  # fmt: skip
ADVICE = {
    TIMESTAMP: "put the date or time at the end of the prompt, or round it",
    IDENTIFIER: "put the identifier behind what all requests share",
    NUMBER: "put the number behind what all requests share",
    KEY_ORDER: "write JSON with sorted keys",
    SPACES: "write white space the same way each time",
    OTHER: "put what changes behind what all requests share",
}


@dataclass(frozen=True, slots=True)
class MissText:
    """The text around the first token that differs, on both sides, with >< before it, and what kind of text changes."""

    ours: str
    theirs: str
    changes: str

    @classmethod
    def of(cls, miss: Missed, text_of: Callable[[Sequence[int]], str], *, own: bool) -> MissText:
        """`own`: what is cached may be shown."""
        if not miss.ours:
            return cls("", "", "")
        at = min(AROUND, miss.differs_at)
        before, ours = text_of(miss.ours[:at]), text_of(miss.ours[at:])
        theirs = text_of(miss.theirs[at:])
        return cls(
            f"{before}><{ours}", f"{before}><{theirs}" if own else "", what_changes(before, ours, theirs)
        )


def what_changes(before: str, ours: str, theirs: str) -> str:
    """The kind of text that two prompts differ in, by what stands at the first difference and around it."""
    tail = before[-16:]
    left, right = tail + ours[:24], tail + theirs[:24]
    if not ours.strip() or not theirs.strip() or ours[:1].isspace() != theirs[:1].isspace():
        return SPACES
    if _UUID.search(left) and _UUID.search(right):
        return IDENTIFIER
    if _TIME.search(left) and _TIME.search(right):
        return TIMESTAMP
    keys = set(_KEY.findall(before[-24:] + ours)), set(_KEY.findall(before[-24:] + theirs))
    if keys[0] & keys[1] and _KEY.search(tail[-3:] + ours[:40]) and _KEY.search(tail[-3:] + theirs[:40]):
        return KEY_ORDER
    if ours[:1].isdigit() and theirs[:1].isdigit():
        return NUMBER
    return OTHER


@dataclass(frozen=True, slots=True)
class Template:
    """Prompts that parted at the same place, in the same kind of text: their number, and what they lost together."""

    requests: int
    lost: int
    differs_at: int
    text: MissText


def templates(missed: Iterable[tuple[Missed, MissText]]) -> list[Template]:
    """Misses by the text before the first difference and what changes there, those that lost most first."""
    groups: dict[tuple[str, str], list[tuple[Missed, MissText]]] = {}
    for miss, text in missed:
        groups.setdefault((text.ours.partition("><")[0], text.changes), []).append((miss, text))
    found = [
        Template(len(one), sum(miss.lost for miss, _ in one), one[-1][0].differs_at, one[-1][1])
        for one in groups.values()
    ]
    return sorted(found, key=lambda one: -one.lost)
