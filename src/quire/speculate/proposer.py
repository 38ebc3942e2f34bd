"""What proposes drafts: guesses at the next tokens of running sequences. No guess changes a text, only its speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from quire.types import NewSeq


class Offer(NamedTuple):
    """What a proposer has for a sequence: up to `length` drafts. Acceptance is counted by `grade`, from 0 up, so that
    good guesses and poor ones of a sequence are told apart."""

    length: int
    grade: int


class Proposer(Protocol):
    """Knows the tokens of running sequences, by id, and guesses at those after them."""

    GRADES: int

    def start(self, new: NewSeq) -> None:
        """Take in a sequence that starts or resumes."""

    def stop(self, seq_id: int) -> None:
        """Forget a sequence."""

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        """Take in the tokens that a step added to a sequence."""

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        """What there is for each of these sequences; one without an offer is left out. Cheap."""

    def propose(self, counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Drafts for sequences that had an offer, at most so many of each."""
