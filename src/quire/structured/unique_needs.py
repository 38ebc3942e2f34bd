"""What a grammar cannot say about keys and items that come once: it travels in a line of the grammar's source."""

from __future__ import annotations

import re
from dataclasses import fields

from quire.records import dataclass

_MARK = "// unique:"
_END = re.compile(r"\\n|\n")  # of a line, in JSON or as it is


@dataclass(frozen=True, slots=True)
class UniqueNeeds:
    """What is followed beside a grammar: keys always, items if `items`. `tails`: texts may run out behind what has been
    written of one. `compact`: JSON has no white space.
    """

    items: bool = False
    tails: bool = False
    compact: bool = False

    def line(self) -> str:
        """As a line of a grammar."""
        return " ".join([_MARK, *(field.name for field in fields(self) if getattr(self, field.name))])

    @classmethod
    def of(cls, source: str) -> UniqueNeeds | None:
        """Of a grammar in its serialized form; None if every key has a rule of its own."""
        if _MARK not in source:
            return None
        words = {word for rest in source.split(_MARK)[1:] for word in _END.split(rest, 1)[0].split()}
        return cls(**{field.name: field.name in words for field in fields(cls)})
