"""Predicted outputs: a request brings the text that its answer may turn out to be, and that text is the draft.

As OpenAI's `prediction`. Where the answer differs, the place in the prediction is found again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from weakref import WeakValueDictionary

from quire._native import LONGEST_MATCH, NgramIndex
from quire.speculate.proposer import Offer, Room
from quire.speculate.step_costs import PassCosts
from quire.types import NewSeq, TokenIds

SHORTEST_MATCH = 2  # tokens after a difference, that say where an answer goes on in its prediction
LONG = 8  # tokens that agreed: the next ones are rarely wrong


class PredictionProposer:
    """Follows each answer through the prediction of its request. Sequences without one get no drafts.

    An answer that leaves its prediction is taken to have one token in the place of another, once; then two of its
    tokens in a row must stand in the prediction. Of several such places the nearest is taken.
    """

    GRADES = 3  # after a difference, after a match, after LONG tokens that agreed
    MOST_SECONDS = 0.05
    passes: PassCosts | None = None

    def __init__(self) -> None:
        self._answers: dict[int, _Answer] = {}
        self._predictions: WeakValueDictionary[str, _Prediction] = WeakValueDictionary()  # by request

    def start(self, new: NewSeq) -> None:
        if new.prediction:
            prediction = self._predictions.get(new.request_id)
            if prediction is None:
                prediction = self._predictions[new.request_id] = _Prediction(new.prediction)
            answer = self._answers[new.seq_id] = _Answer(prediction)
            answer.follow(new.token_ids[new.prompt_len :])

    def stop(self, seq_id: int) -> None:
        self._answers.pop(seq_id, None)

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        if (answer := self._answers.get(seq_id)) is not None:
            answer.follow(tokens)

    def sees(self, seq_ids: Iterable[int]) -> bool:
        answers = self._answers
        return bool(answers) and any(seq_id in answers and answers[seq_id].left > 0 for seq_id in seq_ids)

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        offers = {}
        for seq_id in seq_ids:
            answer = self._answers.get(seq_id)
            if answer is not None and (length := min(most, answer.left)) > 0:
                offers[seq_id] = Offer(length, (answer.agreed > 0) + (answer.agreed >= LONG), behind=0.0)
        return offers

    def propose(self, rooms: Mapping[int, Room]) -> dict[int, list[int]]:
        return {seq_id: self._answers[seq_id].next(room.drafts) for seq_id, room in rooms.items()}


class _Prediction:
    """What the samples of a request share."""

    def __init__(self, tokens: TokenIds) -> None:
        self.tokens = tokens

    @cached_property
    def index(self) -> NgramIndex:
        """Made where the first answer leaves the prediction."""
        index = NgramIndex(SHORTEST_MATCH, LONGEST_MATCH, len(self.tokens))
        index.append_array(self.tokens)
        return index


class _Answer:
    """An answer and its place in the prediction; `agreed` tokens before are those of the answer."""

    __slots__ = ("_differed", "_end", "_lost", "_moved", "_place", "_predicted", "_prediction", "agreed")

    def __init__(self, prediction: _Prediction) -> None:
        self._prediction, self._predicted = prediction, prediction.tokens
        self._end: list[int] = []  # of the answer
        self._place, self._lost = 0, False
        self._differed, self._moved = -1, True  # the last place that did; whether a token agreed since
        self.agreed = 1  # nothing differs yet

    @property
    def left(self) -> int:
        """Predicted tokens after the place; 0 where there is none."""
        return 0 if self._lost else len(self._predicted) - self._place

    def next(self, count: int) -> list[int]:
        """The tokens after the place."""
        return self._predicted[self._place : self._place + count].tolist()

    def follow(self, tokens: list[int]) -> None:
        """Take in tokens of the answer."""
        predicted, end = self._predicted, self._end
        for token in tokens:
            end.append(token)
            if self.left and predicted[self._place] == token:
                self._place += 1
                self.agreed += 1
                self._moved = True
            else:
                self._find()
        del end[:-LONGEST_MATCH]

    def _find(self) -> None:
        """Find the place after a difference. In a repeating text a match can lead back to the same difference, or to
        another one: then that token counts as replaced.
        """
        again = self._place == self._differed or not self._moved
        again, self._differed, self._moved = again and self.agreed > 0 and not self._lost, self._place, False
        matched, place = 0, 0
        if not again:
            matched, place = self._prediction.index.align(self._end[-LONGEST_MATCH:], self._place)
        if matched:
            self._place, self.agreed, self._lost = place, matched, False
        elif self.agreed and self.left > 1:
            self._place, self.agreed = self._place + 1, 0
        else:
            self._lost = True
