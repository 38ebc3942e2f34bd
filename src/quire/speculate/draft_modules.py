"""Several modules draft, each a token further ahead: multi-token prediction (DeepSeek-V3, arXiv 2412.19437, 2.2).

    position          0         1         …   n - 2
    module 0    f0, x1    f1, x2        f(n - 2), x(n - 1)      ─► guess at x(n), rows h0
    module 1    h0, x2    h1, x3        h(n - 2), guess at x(n) ─► guess at x(n + 1), rows of its own …

Module k takes at a position the token 1 + k behind it, and the row that module k - 1 left there. At its last k places
these are guesses: they are computed again when the tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from quire.executor.base import F32, Executor, Outputs, StepArrays
from quire.records import dataclass
from quire.speculate.draft_passes import DraftPasses, Draw, PassRow
from quire.speculate.feature_drafts import KEPT
from quire.speculate.proposer import DraftTree, Offer, Room
from quire.speculate.step_costs import PassCosts
from quire.speculate.target_rows import TargetRows
from quire.speculate.tree_growth import DraftPlace, TreeGrowth
from quire.types import NewSeq, ScheduledSeq


@dataclass(slots=True)
class _Text:
    """A sequence. Of each module: positions before `done` are in its cache, and the rows that it takes at those after
    them are in `rows`. `trunk`: the places of the drafts, of one module each."""

    line: int
    tokens: list[int]
    done: list[int]
    rows: list[F32]
    trunk: list[DraftPlace]

    @property
    def ready(self) -> bool:
        """Whether there are features of all tokens but the last."""
        return len(self.rows[0]) > 0 and self.done[0] + len(self.rows[0]) == len(self.tokens) - 1

    def known(self, module: int) -> int:
        """Rows of a module whose tokens are known."""
        return max(0, min(len(self.rows[module]), len(self.tokens) - 1 - module - self.done[module]))

    def drop(self, module: int, count: int) -> None:
        """The first rows of a module are in its cache."""
        self.done[module] += count
        self.rows[module] = self.rows[module][count:]


class ModuleDraftProposer:
    """Drafts with the modules of a program, bound to `arrays` on the target's lines, one draft of each in a row; for
    texts of up to `longest` tokens. A sequence whose drafts nobody wants for KEPT tokens goes on without."""

    GRADES = 1
    MOST_SECONDS = float("inf")  # passes are weighed by what they cost

    def __init__(
        self, executor: Executor, arrays: StepArrays, rows: TargetRows, draw: Draw, line: Callable[[int], int], *,
        growth: TreeGrowth, costs: PassCosts, max_tokens: int, longest: int,
    ) -> None:  # fmt: skip
        program = executor.program
        self._executor, self._target, self._line, self._longest = executor, rows, line, longest
        self._inputs, self._growth, self._most = program.inputs, growth, max_tokens
        self._ends = [*(given.first_op for given in program.inputs[1:]), len(program.body)]
        self._module, self._given, self._hidden = (
            0,
            np.zeros((0, 0), np.float32),
            np.zeros((0, 0), np.float32),
        )
        self._passes = [
            DraftPasses(
                self._run, arrays, draw, growth, vocab=program.ids or program.vocab, max_tokens=max_tokens,
                costs=costs, ahead=2 + module,
            )
            for module in range(len(program.inputs))
        ]  # fmt: skip
        self.passes: PassCosts | None = costs
        self._texts: dict[int, _Text] = {}

    def start(self, new: NewSeq) -> None:
        if new.soft_tokens:
            return
        count = len(self._inputs)
        width = self._executor.program.buffer(self._inputs[0].buffer).cols
        none = [np.zeros((0, width), np.float32) for _ in range(count)]
        self._texts[new.seq_id] = _Text(self._line(new.seq_id), list(new.token_ids), [0] * count, none, [])

    def stop(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)

    def ran(self, rows: Sequence[ScheduledSeq], added: Sequence[Sequence[int]]) -> None:
        """Take the features that a step left; those of prompts go into the caches at once."""
        for row, features in self._target.of(rows, added):
            text = self._texts.get(row.seq_id)
            if text is None:
                continue
            start = row.start - text.done[0]
            if not 0 <= start <= len(text.rows[0]):  # after a prefix that was found
                start, text.done = 0, [row.start] * len(text.done)
                text.rows = [rows[:0] for rows in text.rows]
            text.rows[0] = np.concatenate((text.rows[0][:start], features))
            if len(row.token_ids) - row.drafts > 1:
                self._take_in(text)
            elif len(text.rows[0]) > KEPT + row.drafts:
                del self._texts[row.seq_id]

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        text = self._texts.get(seq_id)
        if text is not None:
            if text.trunk:
                self._growth.learn(text.trunk[0], tokens)
            text.tokens += tokens
            text.trunk = []

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        offers = {}
        for seq_id in seq_ids:
            text = self._texts.get(seq_id)
            if text is not None and text.ready and len(text.tokens) + most <= self._longest:
                offers[seq_id] = self._growth.offer(most, len(text.rows[0]), min(most, len(self._inputs)))
        return offers

    def propose(self, rooms: Mapping[int, Room]) -> dict[int, DraftTree | list[int]]:
        room, texts = self._most, dict[int, _Text]()
        for seq_id in rooms:
            text = self._texts.get(seq_id)
            if text is not None and text.ready:
                if len(text.tokens) - text.done[-1] > KEPT:  # the last modules were not asked for long
                    self._take_in(text, 1)
                behind = len(text.tokens) - 1 - text.done[-1]
                if behind <= room:
                    room -= behind
                    texts[seq_id] = text
        guessed = dict.fromkeys(texts, np.zeros((0, 0), np.float32))  # rows that come of drafts
        going = texts
        for module in range(len(self._inputs)):
            if module:
                going = {s: t for s, t in going.items() if self._growth.goes_on(t.trunk, rooms[s])}
            if not going:
                break
            self._draft(module, going, guessed)
        return {s: self._growth.drafts(t.trunk[0], rooms[s].drafts) for s, t in texts.items()}

    def _draft(self, module: int, texts: Mapping[int, _Text], guessed: dict[int, F32]) -> None:
        """A pass of a module that gives the next place of each text; `guessed` become the rows for the next one."""
        pieces, given = list[PassRow](), list[F32]()
        for seq_id, text in texts.items():
            more = [place.token_ids[0] for place in text.trunk]
            tokens = (text.tokens + more)[text.done[module] + 1 + module :]
            pieces.append(PassRow(text.line, text.done[module], tokens))
            given.append(
                np.concatenate((text.rows[module], guessed[seq_id])) if module else text.rows[module]
            )
        places, at = self._pass(module, pieces, given), 0
        for (seq_id, text), place, piece in zip(texts.items(), places, pieces, strict=True):
            made, known = self._hidden[at : at + len(piece.tokens)], text.known(module)
            at += len(piece.tokens)
            self._keep(text, module, made[:known])
            guessed[seq_id] = made[known:]
            if text.trunk:
                text.trunk[-1].below[0] = place
            text.trunk.append(place)

    def _keep(self, text: _Text, module: int, made: F32) -> None:
        """A module has computed its first rows, and left rows for the next one."""
        text.drop(module, len(made))
        if module + 1 < len(self._inputs):
            text.rows[module + 1] = np.concatenate((text.rows[module + 1], made))

    def _take_in(self, text: _Text, first: int = 0) -> None:
        """Passes of the modules from `first` on over rows whose tokens are known."""
        for module in range(first, len(self._inputs)):
            while count := min(text.known(module), self._most):
                start = text.done[module]
                tokens = text.tokens[start + 1 + module : start + 1 + module + count]
                self._pass(
                    module, [PassRow(text.line, start, tokens, draws=False)], [text.rows[module][:count]]
                )
                self._keep(text, module, self._hidden)

    def _pass(self, module: int, pieces: list[PassRow], rows: list[F32]) -> list[DraftPlace]:
        self._module, self._given = module, np.concatenate(rows)
        return self._passes[module].run(pieces)

    def _run(self, tokens: int, rows: int, logit_rows: int) -> Outputs:
        executor, given = self._executor, self._inputs[self._module]
        executor.write(given.buffer, self._given)
        executor.run_range(tokens, rows, logit_rows, given.first_op, self._ends[self._module])
        outputs = executor.run_head(logit_rows)
        self._hidden = outputs["hidden"].copy()
        return outputs
