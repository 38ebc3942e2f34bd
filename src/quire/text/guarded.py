"""Control tokens spelled in a caller's text: followed through a template, so that they can be encoded as
text.

Only when a caller's string spells one (which ordinary requests do not), each occurrence is wrapped in a
pair of noncharacters before rendering; the pairs are found, and removed, in what the template printed. A
pair that a template took apart is dropped without effect.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from quire.types import RequestError

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never assigned: Unicode 15, section 23.7


@dataclass(frozen=True, slots=True)
class Marks:
    """Three characters that occur nowhere in the input: around a spelled control token, and the end of a
    text.
    """

    start: str
    end: str
    tag: str

    def unescape(self, text: str) -> str:
        """Undo the escapes that a JSON filter restricted to ASCII gives the marks."""
        for mark in (self.start, self.end, self.tag):
            text = text.replace(_escape(mark), mark)
        return text


def find_free_marks(values: Any) -> Marks:
    """Three marks that no string in `values` contains, plain or as a JSON escape."""
    taken: set[str] = set()
    for text in _strings(values):
        taken.update(mark for mark in _NONCHARACTERS if mark in text or _escape(mark) in text)
    free = [mark for mark in _NONCHARACTERS if mark not in taken]
    if len(free) < 3:
        raise RequestError("messages", "the text uses too many Unicode noncharacters (U+FDD0 to U+FDEF)")
    return Marks(*free[:3])


class ControlTokens:
    """The spellings of a vocabulary's control tokens."""

    def __init__(self, texts: Collection[str]) -> None:
        longest_first = sorted((text for text in texts if text), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def occurs_in(self, values: Any) -> bool:
        """Whether any string in `values` spells a control token."""
        return any(self._any.search(text) for text in _strings(values))

    def mark(self, values: Any, marks: Marks) -> None:
        """Wrap every spelled control token in the values of `values` (nested dicts and lists), in place."""
        stack = [values]
        while stack:
            node = stack.pop()
            for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
                if isinstance(value, str):
                    node[key] = self._any.sub(lambda match: f"{marks.start}{match[0]}{marks.end}", value)
                elif isinstance(value, dict | list):
                    stack.append(value)

    def unmark(self, text: str, marks: Marks) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The text without marks, and the character ranges of the control tokens that are still wrapped."""
        parts: list[str] = []
        literals: list[tuple[int, int]] = []
        size, opened = 0, -1
        for part in re.split(f"([{marks.start}{marks.end}{marks.tag}])", text):
            if part == marks.start:
                opened = size
            elif part == marks.end:
                if opened >= 0 and self._any.fullmatch(parts[-1] if parts else ""):
                    literals.append((opened, size))
                opened = -1
            elif part and part != marks.tag:
                parts.append(part)
                size += len(part)
        return "".join(parts), tuple(literals)


def _escape(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _strings(values: Any) -> Iterator[str]:
    """Every string in nested dicts and lists; keys are left out, as they are not marked."""
    stack = [values]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
