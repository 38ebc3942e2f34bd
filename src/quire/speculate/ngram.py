"""Prompt lookup: the end of a text stood in it before; what followed there is the draft.

A. Saxena, Prompt Lookup Decoding (2023), with the longest match instead of the first, over prompt and output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from quire._native import NgramIndex
from quire.records import dataclass
from quire.speculate.proposer import Offer, Room
from quire.speculate.recent_outputs import OutputOrigin, RecentOutputs
from quire.speculate.step_costs import PassCosts
from quire.types import NewSeq

WINDOW = 2**14  # tokens of a sequence that are searched
LONG = 8  # tokens of a match that is rarely wrong


@dataclass(slots=True)
class _Text:
    """A sequence. `made` are tokens of output since it started or resumed."""

    index: NgramIndex
    origin: OutputOrigin
    made: int = 0
    found: list[int] = field(default_factory=list)


class NgramProposer:
    """Looks matches of `shortest` to `longest` tokens up in the last WINDOW tokens of each sequence; where there are
    none, in the last `recent` tokens of earlier outputs of its origin.
    """

    GRADES = 3  # short matches, long ones, those in other outputs
    MOST_SECONDS = 0.05
    passes: PassCosts | None = None

    def __init__(self, shortest: int, longest: int, recent: int = 0) -> None:
        self._lengths = shortest, longest
        self._recent = RecentOutputs(shortest, longest, recent) if recent else None
        self._texts: dict[int, _Text] = {}

    @staticmethod
    def memory_bound(sequences: int, recent: int) -> int:
        """The most bytes held for so many sequences and tokens of earlier outputs."""
        return sequences * NgramIndex.bound(WINDOW) + RecentOutputs.memory_bound(recent)

    def start(self, new: NewSeq) -> None:
        text = self._texts[new.seq_id] = _Text(NgramIndex(*self._lengths, WINDOW), new.origin)
        text.index.append(new.token_ids[-WINDOW:])

    def stop(self, seq_id: int) -> None:
        text = self._texts.pop(seq_id, None)
        if self._recent is not None and text is not None and text.made:
            self._recent.add(text.origin, text.index, text.made)

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        text = self._texts[seq_id]
        text.index.append(tokens)
        text.made += len(tokens)

    def sees(self, seq_ids: Iterable[int]) -> bool:
        return any(self._matches(self._texts[seq_id]) for seq_id in seq_ids)

    def _matches(self, text: _Text) -> bool:
        if text.index.lookup(0)[0]:
            return True
        return self._recent is not None and self._recent.lookup(text.origin, text.index, 0)[0] > 0

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        offers = {}
        for seq_id in seq_ids:
            text = self._texts[seq_id]
            matched, found = text.index.lookup(most)
            grade = int(matched >= LONG)
            if not matched and self._recent is not None:
                matched, found = self._recent.lookup(text.origin, text.index, most)
                grade = 2
            if matched:
                text.found = found
                offers[seq_id] = Offer(len(found), grade)
        return offers

    def propose(self, rooms: Mapping[int, Room]) -> dict[int, list[int]]:
        return {seq_id: self._texts[seq_id].found[: room.drafts] for seq_id, room in rooms.items()}
