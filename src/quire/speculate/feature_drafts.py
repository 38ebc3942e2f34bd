"""A few layers over the target's features draft: EAGLE (Li et al., arXiv 2401.15077, 2503.01840), and the layers for
multi-token prediction that some checkpoints have (DeepSeek-V3, arXiv 2412.19437).

    position of the draft's cache      0         1         …   n - 2
    what goes in                   f0, x1    f1, x2        f(n - 2), x(n - 1)  ─► guess at x(n) ─► the same with its row

Features are there until the next step of the target, so each is taken when its step has run. The keys and values of the
draft lie in the blocks of the target, at the position of the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

import numpy as np

from quire.executor.base import F32, I32, Executor, Limits, Outputs, StepArrays
from quire.program.program import Input
from quire.records import dataclass
from quire.speculate.draft_branches import DraftBranches
from quire.speculate.draft_passes import DraftPasses, Draw, PassRow
from quire.speculate.proposer import DraftTree, Offer, Room
from quire.speculate.step_costs import PassCosts
from quire.speculate.target_rows import TargetRows
from quire.speculate.tree_growth import DraftPlace, GrowingTree, TreeGrowth
from quire.types import NewSeq, ScheduledSeq

KEPT = 32  # features of a sequence that wait for a draft; then it is given up
PROBE = 16  # sequences, of which one is followed while none is worth it
LEAST_WORTH = 0.1
_LEARN = 0.2  # of a sequence in the share of those that are worth it


@dataclass(slots=True)
class _Text:
    """A sequence. Positions before `done` are in the draft's cache, and the features of `kept` after them are here."""

    line: int
    tokens: list[int]
    done: int
    rows: list[F32] = field(default_factory=list)
    kept: int = 0
    tree: GrowingTree | None = None  # of its latest drafts
    hidden: F32 | None = None  # the rows that its latest places were drawn from
    drafted: bool = False  # somebody wanted drafts of it

    @property
    def ready(self) -> bool:
        """Whether there are features of all tokens but the last."""
        return self.kept > 0 and self.done + self.kept == len(self.tokens) - 1

    def keep(self, count: int) -> None:
        """Only the first so many of the kept features."""
        if count < self.kept:
            self.rows = [np.concatenate(self.rows)[:count]] if count else []
            self.kept = count

    def drop(self, count: int) -> F32:
        """Take the first so many of the kept features."""
        taken, left = list[F32](), count
        while left:
            first, self.rows = self.rows[0], self.rows[1:]
            taken.append(first[:left])
            if left < len(first):
                self.rows = [first[left:], *self.rows]
            left -= len(taken[-1])
        self.done, self.kept = self.done + count, self.kept - count
        return np.concatenate(taken)


class FeatureDraftProposer:
    """Drafts with the program of a draft, bound to `arrays` on the target's lines; for texts of up to `longest` tokens.

    `ids`: the target's ids of the draft's tokens, where they are others. A sequence whose drafts nobody wants for KEPT
    tokens goes on without; while that happens to most, few new ones are followed.
    """

    GRADES = 1
    MOST_SECONDS = float("inf")  # passes are weighed by what they cost
    KEPT = KEPT

    def __init__(
        self, executor: Executor, arrays: StepArrays, rows: TargetRows, draw: Draw, line: Callable[[int], int], *,
        growth: TreeGrowth, costs: PassCosts, limits: Limits, longest: int, ids: I32 | None,
    ) -> None:  # fmt: skip
        program = executor.program
        self._executor, self._target, self._line, self._longest = executor, rows, line, longest
        self._inputs = {x.name: x for x in program.inputs}
        self._given: tuple[Input, list[F32]] | None = None
        self._hidden: F32 | None = None
        # a row is at the position of its feature, one before its token
        self._passes = DraftPasses(
            self._run, arrays, draw, growth, vocab=program.ids or program.vocab, max_tokens=limits.max_tokens,
            costs=costs, ahead=2, ids=ids,
        )  # fmt: skip
        self._branches = DraftBranches(arrays, limits, executor.copy_blocks)
        self.passes: PassCosts | None = costs
        self._texts: dict[int, _Text] = {}
        self._worth, self._started = 1.0, 0

    def start(self, new: NewSeq) -> None:
        self._started += 1
        if new.soft_tokens or (self._worth < LEAST_WORTH and self._started % PROBE):
            return
        self._texts[new.seq_id] = _Text(self._line(new.seq_id), list(new.token_ids), 0)

    def stop(self, seq_id: int) -> None:
        if (text := self._texts.pop(seq_id, None)) is not None:
            self._worth += _LEARN * (text.drafted - self._worth)

    def ran(self, rows: Sequence[ScheduledSeq], added: Sequence[Sequence[int]]) -> None:
        """Take the features that a step left; those of prompts go into the draft's cache at once."""
        behind = []
        for row, features in self._target.of(rows, added, self._texts):
            text = self._texts[row.seq_id]
            start = row.start - text.done
            if 0 <= start <= text.kept:
                text.keep(start)
            else:  # after a prefix that was found
                text.done, text.rows, text.kept = row.start, [], 0
            text.kept += len(features)
            if len(row.token_ids) - row.drafts > 1:
                text.rows.append(features)
                behind.append(text)
            elif text.kept <= KEPT + row.drafts:
                text.rows.append(features.copy())
            else:
                self.stop(row.seq_id)
        if behind:
            self._take_in(behind)

    def extend(self, seq_id: int, tokens: list[int]) -> None:
        text = self._texts.get(seq_id)
        if text is not None:
            if text.tree is not None:
                self._passes.growth.learn(text.tree.root, tokens)
            text.tokens += tokens
            text.tree = None

    def look(self, seq_ids: Iterable[int], most: int) -> dict[int, Offer]:
        offers, growth = {}, self._passes.growth
        for seq_id in seq_ids:
            text = self._texts.get(seq_id)
            if text is not None and text.ready and len(text.tokens) + most <= self._longest:
                offers[seq_id] = growth.offer(most, text.kept)
        return offers

    def propose(self, rooms: Mapping[int, Room]) -> dict[int, DraftTree | list[int]]:
        room, texts, growth = self._passes.max_tokens, dict[int, _Text](), self._passes.growth
        for seq_id in rooms:
            text = self._texts.get(seq_id)
            if text is not None and text.ready and text.kept <= room:
                room -= text.kept
                texts[seq_id], text.drafted = text, True
        if not texts:
            return {}
        pieces = [PassRow(t.line, t.done, t.tokens[t.done + 1 :]) for t in texts.values()]
        places = self._pass(pieces, "features", [t.drop(t.kept) for t in texts.values()])
        hidden, trees = self._made(), dict[int, tuple[_Text, GrowingTree]]()
        for at, ((seq_id, text), place) in enumerate(zip(texts.items(), places, strict=True)):
            text.tree, text.hidden = GrowingTree(place), hidden[at : at + 1]
            trees[seq_id] = text, text.tree
        self._branches.clear()
        left = trees
        while left := {
            s: (text, tree)
            for s, (text, tree) in left.items()
            if self._branches.go_on(growth, tree, rooms[s], text.line, len(text.tokens) - 1)
        }:
            self._deeper(list(left.values()))
        return {s: growth.drafts(tree.root, rooms[s].drafts) for s, (_, tree) in trees.items()}

    def _deeper(self, trees: list[tuple[_Text, GrowingTree]]) -> None:
        """A pass that gives the places behind the tips of each tree."""
        self._branches.copy()
        pieces, rows = list[PassRow](), list[F32]()
        for text, tree in trees:
            assert text.hidden is not None
            pieces += self._branches.rows(tree, text.line, len(text.tokens) - 1)
            rows.append(text.hidden[[tip.parent for tip in tree.tips]])
        places, hidden, at = self._pass(pieces, "hidden", rows), self._made(), 0
        for text, tree in trees:
            end = at + len(tree.tips)
            tree.add(places[at:end])
            text.hidden, at = hidden[at:end], end

    def _made(self) -> F32:
        """The rows that the places of the last pass were drawn from."""
        assert self._hidden is not None
        return self._hidden.copy()

    def _take_in(self, texts: list[_Text]) -> None:
        """Passes over features whose next tokens are known."""
        for text in texts:
            while known := min(text.kept, len(text.tokens) - 1 - text.done, self._passes.max_tokens):
                piece = PassRow(
                    text.line, text.done, text.tokens[text.done + 1 : text.done + 1 + known], draws=False
                )
                self._pass([piece], "features", [text.drop(known)])
            text.rows = [rows.copy() for rows in text.rows]

    def _pass(self, pieces: list[PassRow], name: str, rows: list[F32]) -> list[DraftPlace]:
        self._given = self._inputs[name], rows
        return self._passes.run(pieces)

    def _run(self, tokens: int, rows: int, logit_rows: int) -> Outputs:
        assert self._given is not None
        given, features = self._given
        self._executor.write(given.buffer, np.concatenate(features))
        outputs = self._executor.run(tokens, rows, logit_rows, given.first_op)
        self._hidden = outputs["hidden"]
        return outputs
