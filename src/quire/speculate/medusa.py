"""Heads over the target's last hidden row draft, each a token further ahead: Cai et al., Medusa (arXiv 2401.10774).

What a head names does not depend on the drafts before, so any of its tokens may follow any of the head before. A tree
is what is likeliest of all these paths, and costs no more to make than a chain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from quire.executor.base import F32, Executor, StepArrays
from quire.records import dataclass
from quire.speculate.draft_passes import Draw
from quire.speculate.proposer import DraftTree, Offer, Room
from quire.speculate.step_costs import PassCosts
from quire.speculate.target_rows import TargetRows
from quire.speculate.tree_growth import DraftPlace, TreeGrowth
from quire.types import NewSeq, ScheduledSeq


@dataclass(slots=True)
class _Text:
    """A sequence of `length` tokens, and the hidden row of position `at`. `root`: what was said of the next place."""

    line: int
    length: int
    at: int = -1
    row: F32 | None = None
    root: DraftPlace | None = None

    @property
    def last(self) -> F32 | None:
        """The row of the last position that the target has computed; None if it is not here."""
        return self.row if self.at == self.length - 2 else None


class MedusaProposer:
    """Drafts with the program of the heads: one pass gives all drafts of all sequences."""

    GRADES = 1
    MOST_SECONDS = float("inf")
    KEPT = 0  # a head knows the row of the last position alone

    def __init__(
        self, executor: Executor, arrays: StepArrays, rows: TargetRows, draw: Draw, line: Callable[[int], int], *,
        growth: TreeGrowth, costs: PassCosts,
    ) -> None:  # fmt: skip
        program = executor.program
        self._executor, self._target, self._draw, self._line = executor, rows, draw, line
        self._vocab, self._input = program.vocab, program.inputs[0].buffer
        self._heads = program.buffer("logits").cols // program.vocab
        arrays.query_start[:] = range(len(arrays.query_start))
        self._growth = growth
        self.passes: PassCosts | None = costs
        self._texts: dict[int, _Text] = {}

    def start(self, new: NewSeq) -> None:
        self._texts[new.seq_id] = _Text(self._line(new.seq_id), len(new.token_ids))

    def stop(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)

    def ran(self, rows: Sequence[ScheduledSeq], added: Sequence[Sequence[int]]) -> None:
        """Keep the row of the last position that the step sampled."""
        for row, features in self._target.of(rows, added, self._texts):
            if row.logits:
                text = self._texts[row.seq_id]
                text.row, text.at = features[-1].copy(), row.start + len(features) - 1

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        text = self._texts[seq_id]
        self._growth.learn(text.root, tokens)
        text.root = None
        text.length += len(tokens)

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        offer = self._growth.offer(most, 1.0, min(most, self._heads))
        return {seq_id: offer for seq_id in seq_ids if self._texts[seq_id].last is not None}

    def propose(self, rooms: Mapping[int, Room]) -> dict[int, DraftTree | list[int]]:
        started = time.perf_counter()
        texts = {seq_id: self._texts[seq_id] for seq_id in rooms}
        rows = [text.last for text in texts.values()]
        self._executor.write(self._input, np.stack([row for row in rows if row is not None]))
        made = self._executor.run(len(rows), len(rows), 0)["logits"].reshape(-1, self._vocab)
        depths = [min(room.depth, self._heads) for room in rooms.values()]
        wanted = [at * self._heads + head for at, depth in enumerate(depths) for head in range(depth)]
        lines = np.repeat(np.array([text.line for text in texts.values()], np.int32), depths)
        positions = [
            text.length + head
            for text, depth in zip(texts.values(), depths, strict=True)
            for head in range(depth)
        ]
        logits = made if len(wanted) == len(made) else made[wanted]
        guesses = self._draw(
            {"logits": logits}, lines, np.array(positions, np.int32), None, self._growth.width
        )
        places = iter(self._growth.places(guesses))
        drafts: dict[int, DraftTree | list[int]] = {}
        for (seq_id, text), depth in zip(texts.items(), depths, strict=True):
            heads = [next(places) for _ in range(depth)]
            for place, then in pairwise(heads):
                place.below = [then] * len(place.token_ids)
            text.root = heads[0]
            drafts[seq_id] = self._growth.drafts(text.root, rooms[seq_id].drafts)
        assert self.passes is not None
        self.passes.observe(len(rows), time.perf_counter() - started)
        return drafts
