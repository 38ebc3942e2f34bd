"""Which tokens of an answer were accepted drafts, for requests that ask."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import MutableSequence, Sequence

from quire.engine.api import GenerateAsk

_COUNT = 5  # bytes of a position, in an array with room to grow


def places_for(samples: int) -> list[MutableSequence[int]]:
    """Where an engine puts the positions of accepted drafts: an array for each sample."""
    return [array("i") for _ in range(samples)]


def marks_cost(asks: Sequence[GenerateAsk], generated: int) -> int:
    """Bytes of the positions of accepted drafts in answers of so many tokens in all."""
    return 0 if asks[0].accepted is None else generated * _COUNT


class DraftMarks:
    """Positions of accepted drafts in the tokens of an answer's choices; choice p·n + i is sample i of prompt p."""

    def __init__(self, asks: Sequence[GenerateAsk]) -> None:
        self._accepted = [places for ask in asks for places in ask.accepted or ()]
        self._sent = [0] * len(self._accepted)  # tokens that were sent in chunks

    def of_next(self, choice: int, tokens: int) -> list[int]:
        """Those among the next tokens of a choice, as a stream sends them; positions count from its first token."""
        first = self._sent[choice]
        self._sent[choice] = first + tokens
        return self._between(choice, first, first + tokens)

    def of_all(self, choice: int, tokens: int) -> list[int]:
        """Those of a choice that has so many tokens."""
        return self._between(choice, 0, tokens)

    def _between(self, choice: int, first: int, end: int) -> list[int]:
        found = self._accepted[choice]
        return list(found[bisect_left(found, first) : bisect_left(found, end)])


def marks_of(asks: Sequence[GenerateAsk]) -> DraftMarks | None:
    """The marks of an answer; None for a request that does not ask for them."""
    return None if asks[0].accepted is None else DraftMarks(asks)
