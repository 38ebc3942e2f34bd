"""What a rule says."""

from __future__ import annotations

from collections.abc import Mapping

from quire.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause: its name, a sentence, the numbers that show it, and what to try. `problem`: somebody suffers from it."""

    name: str
    says: str
    evidence: Mapping[str, float | str]
    suggestions: tuple[str, ...] = ()
    problem: bool = True
