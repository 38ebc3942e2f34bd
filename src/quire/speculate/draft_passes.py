"""Passes of a draft program over some tokens of running sequences, on their lines of the block tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from quire.executor.base import I32, Guesses, Outputs, StepArrays
from quire.speculate.step_costs import PassCosts
from quire.speculate.tree_growth import DraftPlace, TreeGrowth

Run = Callable[[int, int, int], Outputs]  # tokens, rows, logit rows; see Runnable.run


class PassRow(NamedTuple):
    """Tokens of a sequence from a position on. With `draws`, the token after them is drawn. `branch`: the line of the
    path that they are on, where that is not the sequence's own."""

    line: int
    start: int
    tokens: Sequence[int]
    draws: bool = True
    branch: int = -1


class Draw(Protocol):
    """Draws `count` tokens for each row of logits with the noise of its sequence and position, and counts none; `ids`
    are the tokens of the columns, where those are not the first ones. See Worker.guess."""

    def __call__(
        self, outputs: Outputs, lines: I32, positions: I32, ids: I32 | None = None, count: int = 1
    ) -> Guesses: ...


class DraftPasses:
    """Runs passes of up to `max_tokens` tokens. `vocab`: ids from there on have no embedding in the draft. The tokens
    of a row are drawn for the position `ahead` of it, among `ids` if they are given, for places of `growth`."""

    def __init__(
        self, run: Run, arrays: StepArrays, draw: Draw, growth: TreeGrowth, *, vocab: int, max_tokens: int,
        costs: PassCosts, ahead: int = 1, ids: I32 | None = None,
    ) -> None:  # fmt: skip
        self._run, self._arrays, self._ahead, self._ids = run, arrays, ahead, ids
        self.draw = draw  # another may take its place between two passes
        self._vocab, self.max_tokens, self.costs, self.growth = vocab, max_tokens, costs, growth

    def run(self, pieces: Sequence[PassRow]) -> list[DraftPlace]:
        """One pass; what it says of the next tokens, in order of the pieces that draw."""
        started = time.perf_counter()
        arrays, end, last = self._arrays, 0, self._vocab - 1
        lines, positions = list[int](), list[int]()  # of the rows that draw
        for row, piece in enumerate(pieces):
            arrays.slots[row] = piece.line if piece.branch < 0 else piece.branch
            arrays.query_start[row] = end
            count = len(piece.tokens)
            if count == 1:  # most rows; a slice takes longer
                arrays.token_ids[end], arrays.positions[end] = min(piece.tokens[0], last), piece.start
            else:
                np.minimum(piece.tokens, last, out=arrays.token_ids[end : end + count])
                arrays.positions[end : end + count] = range(piece.start, piece.start + count)
            end += count
            if piece.draws:
                arrays.logit_rows[len(lines)] = end - 1
                lines.append(piece.line)
                positions.append(piece.start + count - 1 + self._ahead)
        arrays.query_start[len(pieces)] = end
        outputs = self._run(end, len(pieces), len(lines))
        places: list[DraftPlace] = []
        if lines:
            at, growth = (np.array(lines, np.int32), np.array(positions, np.int32)), self.growth
            places = growth.places(self.draw(outputs, *at, self._ids, growth.width))
        self.costs.observe(end, time.perf_counter() - started)
        return places
