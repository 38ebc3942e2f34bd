"""Drafts of a known acceptance: recorded outputs, proposed again with errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quire.executor.base import I32, Guesses, Outputs
from quire.records import dataclass
from quire.speculate.draft_model import DraftModelProposer
from quire.speculate.draft_passes import Draw
from quire.speculate.proposer import DraftTree, Offer, Room
from quire.speculate.step_costs import PassCosts, StepCosts
from quire.types import NewSeq


@dataclass(slots=True)
class _Text:
    """A sequence: the drafts of its output, and its tokens so far."""

    prompt_len: int
    drafts: list[int]
    length: int

    def after(self, count: int) -> list[int]:
        """The next drafts."""
        place = self.length - self.prompt_len
        return self.drafts[place : place + count]


class _KnownDraw:
    """Draws as a draft model does, for the time that it takes, and gives other tokens."""

    def __init__(self, draw: Draw, known: Callable[[I32, I32], list[int]]) -> None:
        self.beneath, self._known = draw, known

    def __call__(
        self, outputs: Outputs, lines: I32, positions: I32, ids: I32 | None = None, count: int = 1
    ) -> Guesses:
        self.beneath(outputs, lines, positions, ids, count)
        tokens = np.full((len(lines), count), -1, np.int32)
        tokens[:, 0] = self._known(lines, positions)
        return Guesses(tokens, (tokens >= 0).astype(np.float32))


class KnownDrafts:
    """Proposes the recorded output of each prompt, in chains; every draft is wrong with chance 1 - `rate`, drawn anew
    each time a prompt runs. With a draft model its passes give these drafts, and the drafts cost what they do.
    """

    GRADES = 1

    def __init__(
        self, rate: float, vocab: int, *, model: DraftModelProposer | None = None, seed: int = 0
    ) -> None:
        self._rate, self._vocab, self._model = rate, vocab, model
        self.MOST_SECONDS = model.MOST_SECONDS if model else 0.05
        self.passes: PassCosts | None = model.passes if model else None
        self._random = random.Random(f"{seed} {rate}")
        self._outputs: dict[tuple[int, ...], list[int]] = {}
        self._texts: dict[int, _Text] = {}
        self._lines: dict[int, _Text] = {}
        if model:
            before = model.draw
            self._known = _KnownDraw(before.beneath if isinstance(before, _KnownDraw) else before, self._draw)

    def record(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Learn what follows a prompt."""
        self._outputs[tuple(prompt)] = list(output)

    def start(self, new: NewSeq) -> None:
        output = self._outputs[tuple(new.token_ids[: new.prompt_len])]
        draw, rate, vocab = self._random.random, self._rate, self._vocab
        drafts = [token if draw() < rate else (token + 1) % vocab for token in output]
        self._texts[new.seq_id] = _Text(new.prompt_len, drafts, len(new.token_ids))
        if self._model:
            self._model.start(new)
            self._model.draw = self._known  # several may use one model, in turns
            self._lines[self._model.line(new.seq_id)] = self._texts[new.seq_id]

    def stop(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)
        if self._model:
            self._model.stop(seq_id)

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        self._texts[seq_id].length += len(tokens)
        if self._model:
            self._model.extend(seq_id, tokens)

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        offers = {}
        for seq_id, offer in self._offers(list(seq_ids), most).items():
            text = self._texts[seq_id]
            left = text.prompt_len + len(text.drafts) - text.length
            if left > 0:
                offers[seq_id] = offer._replace(length=min(most, left), depth=0, siblings=())
        return offers

    def _offers(self, seq_ids: list[int], most: int) -> dict[int, Offer]:
        if self._model:
            return self._model.look(seq_ids, most)
        return dict.fromkeys(seq_ids, Offer(most, 0))

    def propose(self, rooms: Mapping[int, Room]) -> dict[int, list[int]]:
        if self._model:
            made = self._model.propose(rooms)
            return {s: own.token_ids if isinstance(own, DraftTree) else own for s, own in made.items()}
        return {seq_id: self._texts[seq_id].after(room.drafts) for seq_id, room in rooms.items()}

    def _draw(self, lines: I32, positions: I32) -> list[int]:
        """The drafts of some lines at some positions."""
        found = []
        for line, position in zip(lines.tolist(), positions.tolist(), strict=True):
            text = self._lines[line]
            found.append(text.drafts[min(position - text.prompt_len, len(text.drafts) - 1)])
        return found


class FixedAllotment:
    """As many drafts for every sequence in each step as the next of `counts` says, whatever it costs."""

    def __init__(self, counts: Iterable[int]) -> None:
        self._counts = iter(counts)
        self.costs = StepCosts(1)
        self.declined = False

    def start(self, seq_id: int) -> None:
        """All sequences are alike."""

    def stop(self, seq_id: int) -> None:
        """All sequences are alike."""

    def observe(self, *_: Any) -> None:
        """Nothing is learned."""

    def observe_step(self, *_: Any) -> None:
        """Nothing is learned."""

    def observe_extra(self, *_: Any) -> None:
        """Nothing is learned."""

    def skipped(self, _: int) -> None:
        """Nothing is learned."""

    def share(self, _: int, offers: Mapping[int, Offer]) -> dict[int, Room]:
        """Drafts for the next step, by sequence."""
        if not (count := next(self._counts)):
            return {}
        counts = {seq_id: min(count, offer.length) for seq_id, offer in offers.items()}
        return {seq_id: Room(count, count) for seq_id, count in counts.items()}
