"""Several modules draft, each a token further ahead: multi-token prediction (DeepSeek-V3, arXiv 2412.19437, 2.2).

    position          0         1         …   n - 2
    module 0    f0, x1    f1, x2        f(n - 2), x(n - 1)      ─► guess at x(n), rows h0
    module 1    h0, x2    h1, x3        h(n - 2), guess at x(n) ─► guess at x(n + 1), rows of its own …

Module k takes at a position the token 1 + k behind it, and the row that module k - 1 left there. At its last k places
these are guesses: they are computed again when the tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

import numpy as np

from quire.executor.base import F32, Executor, Limits, Outputs, StepArrays
from quire.records import dataclass
from quire.speculate.draft_branches import DraftBranches
from quire.speculate.draft_passes import DraftPasses, Draw, PassRow
from quire.speculate.feature_drafts import KEPT
from quire.speculate.proposer import DraftTree, Offer, Room
from quire.speculate.step_costs import PassCosts
from quire.speculate.target_rows import TargetRows
from quire.speculate.tree_growth import DraftPlace, GrowingTree, TreeGrowth
from quire.types import NewSeq, ScheduledSeq


@dataclass(slots=True)
class _Text:
    """A sequence. Of each module: positions before `done` are in its cache, and the rows that it takes at those after
    them are in `rows`. `tree`: of its latest drafts; `guessed`: by place of the module before, rows of drafts."""

    line: int
    tokens: list[int]
    done: list[int]
    rows: list[F32]
    tree: GrowingTree | None = None
    guessed: list[F32] = field(default_factory=list)

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
    KEPT = KEPT

    def __init__(
        self, executor: Executor, arrays: StepArrays, rows: TargetRows, draw: Draw, line: Callable[[int], int], *,
        growth: TreeGrowth, costs: PassCosts, limits: Limits, longest: int,
    ) -> None:  # fmt: skip
        program = executor.program
        self._executor, self._target, self._line, self._longest = executor, rows, line, longest
        self._inputs, self._growth, self._most = program.inputs, growth, limits.max_tokens
        self._ends = [*(given.first_op for given in program.inputs[1:]), len(program.body)]
        self._module, self._given, self._hidden = (
            0,
            np.zeros((0, 0), np.float32),
            np.zeros((0, 0), np.float32),
        )
        self._passes = [
            DraftPasses(
                self._run, arrays, draw, growth, vocab=program.ids or program.vocab, max_tokens=limits.max_tokens,
                costs=costs, ahead=2 + module,
            )
            for module in range(len(program.inputs))
        ]  # fmt: skip
        self._branches = DraftBranches(arrays, limits, executor.copy_blocks)
        self.passes: PassCosts | None = costs
        self._texts: dict[int, _Text] = {}

    def start(self, new: NewSeq) -> None:
        if new.soft_tokens:
            return
        count = len(self._inputs)
        width = self._executor.program.buffer(self._inputs[0].buffer).cols
        none = [np.zeros((0, width), np.float32) for _ in range(count)]
        self._texts[new.seq_id] = _Text(self._line(new.seq_id), list(new.token_ids), [0] * count, none)

    def stop(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)

    def ran(self, rows: Sequence[ScheduledSeq], added: Sequence[Sequence[int]]) -> None:
        """Take the features that a step left; those of prompts go into the caches at once."""
        for row, features in self._target.of(rows, added, self._texts):
            text = self._texts[row.seq_id]
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
            if text.tree is not None:
                self._growth.learn(text.tree.root, tokens)
            text.tokens += tokens
            text.tree = None

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
        left = trees = self._begin(texts) if texts else {}
        for module in range(1, len(self._inputs)):
            self._branches.clear()
            left = {s: (t, tree) for s, (t, tree) in left.items() if self._goes_on(module, t, tree, rooms[s])}
            if not left:
                break
            self._deeper(module, list(left.values()))
        return {s: self._growth.drafts(tree.root, rooms[s].drafts) for s, (_, tree) in trees.items()}

    def _begin(self, texts: Mapping[int, _Text]) -> dict[int, tuple[_Text, GrowingTree]]:
        """The pass of the first module that gives the first place of each text."""
        pieces = [PassRow(t.line, t.done[0], t.tokens[t.done[0] + 1 :]) for t in texts.values()]
        places, at = self._pass(0, pieces, [t.rows[0] for t in texts.values()]), 0
        trees = dict[int, tuple[_Text, GrowingTree]]()
        for (seq_id, text), place, piece in zip(texts.items(), places, pieces, strict=True):
            end = at + len(piece.tokens)
            self._keep(text, 0, self._hidden[at:end])
            text.tree, text.guessed, at = GrowingTree(place), [self._hidden[:0]], end
            trees[seq_id] = text, text.tree
        return trees

    def _goes_on(self, module: int, text: _Text, tree: GrowingTree, room: Room) -> bool:
        """Whether a text has tips for a module; they get their lines."""
        if not self._growth.go_on(tree, room):
            return False
        first = text.done[module] + text.known(module)
        self._branches.fan_out(tree, text.line, first, len(text.tokens) - 2)
        return True

    def _deeper(self, module: int, trees: list[tuple[_Text, GrowingTree]]) -> None:
        """A pass of a module that gives the places behind the tips of each tree."""
        if any(len(tree.tips) > 1 for _, tree in trees):  # what branches go on from
            self._catch_up(module, [text for text, _ in trees])
        self._branches.copy()
        pieces, given = list[PassRow](), list[F32]()
        for text, tree in trees:
            for tip in tree.tips:
                tokens = (text.tokens + tip.path())[text.done[module] + 1 + module :]
                pieces.append(PassRow(text.line, text.done[module], tokens, branch=tip.line))
                given.append(np.concatenate((text.rows[module], text.guessed[tip.parent])))
        places = iter(self._pass(module, pieces, given))
        ends = iter(np.cumsum([len(piece.tokens) for piece in pieces]).tolist())
        start = 0
        for text, tree in trees:
            known, begin, text.guessed = text.known(module), start, []
            for _ in tree.tips:
                end = next(ends)
                text.guessed.append(self._hidden[start + known : end])
                start = end
            self._keep(text, module, self._hidden[begin : begin + known])
            tree.add([next(places) for _ in tree.tips])

    def _catch_up(self, module: int, texts: list[_Text]) -> None:
        """A pass of a module over all rows whose tokens are known."""
        behind = [(text, known) for text in texts if (known := text.known(module))]
        if not behind:
            return
        pieces = [
            PassRow(t.line, start := t.done[module], t.tokens[start + 1 + module :][:known], draws=False)
            for t, known in behind
        ]
        self._pass(module, pieces, [t.rows[module][:known] for t, known in behind])
        at = 0
        for text, known in behind:
            self._keep(text, module, self._hidden[at : at + known])
            at += known

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
