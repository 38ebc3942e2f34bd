"""Predictions of requests before the method of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from quire.speculate.prediction import PredictionProposer
from quire.speculate.proposer import DraftTree, FeatureProposer, Offer, Proposer, Room, WatchingProposer
from quire.types import NewSeq, ScheduledSeq


class Combined:
    """Asks for the prediction first, and the method where that has nothing, or a guess of its poorest grade. Grades of
    the method come after those of predictions. It is a proposer of each kind that the method is."""

    KEPT: int
    ran: Callable[[Sequence[ScheduledSeq], Sequence[Sequence[int]]], None]
    sees: Callable[[Iterable[int]], bool]

    def __init__(self, predictions: PredictionProposer, method: Proposer) -> None:
        self._predictions, self.method = predictions, method
        if isinstance(method, FeatureProposer):
            self.ran, self.KEPT = method.ran, method.KEPT
        if isinstance(method, WatchingProposer):
            seen = method.sees
            self.sees = lambda seq_ids: predictions.sees(seq_ids) or seen(seq_ids)
        self._by_method: set[int] = set()  # sequences with an offer of the method
        self.GRADES = predictions.GRADES + method.GRADES
        self.MOST_SECONDS = max(predictions.MOST_SECONDS, method.MOST_SECONDS)
        self.passes = method.passes

    def start(self, new: NewSeq) -> None:
        self._predictions.start(new)
        self.method.start(new)

    def stop(self, seq_id: int) -> None:
        self._by_method.discard(seq_id)
        self._predictions.stop(seq_id)
        self.method.stop(seq_id)

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        self._predictions.extend(seq_id, tokens)
        self.method.extend(seq_id, tokens)

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        offers = self._predictions.look(seq_ids, most)
        rest = [seq_id for seq_id in seq_ids if seq_id not in offers or not offers[seq_id].grade]
        found = self.method.look(rest, most)
        self._by_method.difference_update(seq_ids)
        self._by_method.update(found)
        for seq_id, offer in found.items():
            grade = self._predictions.GRADES + offer.grade
            offers[seq_id] = Offer(offer.length, grade, *offer[2:])
        return offers

    def propose(self, rooms: Mapping[int, Room]) -> Mapping[int, list[int] | DraftTree]:
        method = {seq_id: room for seq_id, room in rooms.items() if seq_id in self._by_method}
        made = self._predictions.propose({s: room for s, room in rooms.items() if s not in method})
        return {**made, **self.method.propose(method)} if method else made
