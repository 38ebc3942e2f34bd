"""Where passes of a draft write the keys and values of several paths of drafts: a branch is a row of a pass with a line
of its own, as in a step (worker/trees.py). One path of a sequence lies in its own blocks, each other in scratch blocks
that belong to one call of `propose`: nobody else sees them.

    tips        a ─┬─ b ─── d        own line   … t a b d      a path that ends gives its line and blocks back
                   ├─ c ─── e        branch     … t a c e
                   └─ f              branch     … t a f
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.executor.base import Limits, StepArrays
from quire.speculate.draft_passes import PassRow
from quire.speculate.proposer import Room
from quire.speculate.tree_growth import GrowingTree, Tip, TreeGrowth

Copy = Callable[[Sequence[int], Sequence[int]], None]  # see Runnable.copy_blocks


class DraftBranches:
    """Lines behind those of slots, and blocks behind `num_blocks`, in the tables of `arrays`; `limits` say how many."""

    def __init__(self, arrays: StepArrays, limits: Limits, copy: Copy) -> None:
        self._arrays, self._limits, self._copy = arrays, limits, copy
        self._lines: list[int] = []  # that are free
        self._blocks: list[int] = []
        self._held: dict[int, list[int]] = {}  # blocks of branches by their lines
        self._of: dict[int, list[int]] = {}  # lines of branches by that of their sequence
        self._copies: tuple[list[int], list[int]] = [], []

    def clear(self) -> None:
        """Begin with other drafts."""
        limits = self._limits
        if self._held or not self._lines:
            self._lines = list(range(limits.max_rows, limits.lines))
            self._blocks = list(range(limits.num_blocks, limits.blocks))
        self._held.clear()
        self._of.clear()

    def go_on(self, growth: TreeGrowth, tree: GrowingTree, room: Room, own: int, first: int) -> bool:
        """Choose the tips of a tree's next pass. Returns whether there are any; see `place`."""
        if not growth.go_on(tree, room):
            return False
        self.place(tree, own, first, first + tree.depth - 1)
        return bool(tree.tips)

    def rows(self, tree: GrowingTree, own: int, first: int) -> list[PassRow]:
        """The tips of a tree as rows of a pass."""
        at = first + tree.depth - 1
        return [PassRow(own, at, [tip.token], branch=tip.line) for tip in tree.tips]

    def place(self, tree: GrowingTree, own: int, first: int, at: int) -> None:
        """Give the tips of a tree lines for a pass at position `at`; the drafts of the sequence in line `own` begin at
        `first`. Tips for which there is no room are dropped, the poorest first. `copy` must follow."""
        tips = tree.tips
        if len(tips) == 1 and (tips[0].before is None or tips[0].before.line == own):
            tips[0].line, tree.own = own, tips[0]
            return
        goes_on, others = dict[int, Tip](), list[Tip]()
        for tip in tips:
            line = own if tip.before is None else tip.before.line
            if line in goes_on:
                others.append(tip)
            else:
                goes_on[line] = tip
        for line in self._of.get(own, ()):
            if line not in goes_on:
                self._give_back(line)
        placed = {line: tip for line, tip in goes_on.items() if line == own or self._extend(line, first, at)}
        for line in goes_on.keys() - placed.keys():
            self._give_back(line)
        for tip in others:
            before = own if tip.before is None else tip.before.line
            line = own if own not in placed else self._branch(own, first, at)
            if line >= 0 and before in placed:
                self._fork(before, line, first, at)
                placed[line] = tip
        self._of[own] = [line for line in placed if line != own]
        for line, tip in placed.items():
            tip.line = line
        tree.own = placed.get(own, tree.own)
        tree.tips = [tip for tip in tips if tip.line >= 0]

    def fan_out(self, tree: GrowingTree, own: int, first: int, at: int) -> None:
        """As `place` for a pass over the whole paths, from `first` up to `at`: nothing of them has been computed, and
        no branch goes on."""
        tree.tips[0].line = own
        for tip in tree.tips[1:]:
            tip.line = self._branch(own, first, at)
            if tip.line >= 0:
                self._fork(own, tip.line, first, first)
        tree.tips = [tip for tip in tree.tips if tip.line >= 0]

    def copy(self) -> None:
        """Give branches what is in the blocks of the paths that they leave."""
        if self._copies[0]:
            self._copy(*self._copies)
            self._copies = [], []

    def _branch(self, own: int, first: int, at: int) -> int:
        """A line with blocks for the drafts up to position `at`; -1 if there is no room."""
        size = self._limits.block_size
        count = (at // size + 1 - first // size) * len(self._arrays.block_tables)
        if not self._lines or count > len(self._blocks):
            return -1
        line = self._lines.pop()
        self._held[line] = blocks = [self._blocks.pop() for _ in range(count)]
        self._arrays.adapters[line] = self._arrays.adapters[own]
        each = len(blocks) // len(self._arrays.block_tables)
        for group, table in enumerate(self._arrays.block_tables):
            table[line, : first // size] = table[own, : first // size]
            table[line, first // size : at // size + 1] = blocks[group * each : (group + 1) * each]
        return line

    def _extend(self, line: int, first: int, at: int) -> bool:
        """Make room for position `at` behind the drafts of a branch."""
        if at % self._limits.block_size or at == first:
            return True
        tables = self._arrays.block_tables
        if len(tables) > len(self._blocks):
            return False
        for table in tables:
            self._held[line].append(self._blocks.pop())
            table[line, at // self._limits.block_size] = self._held[line][-1]
        return True

    def _fork(self, line: int, other: int, first: int, at: int) -> None:
        """Have what is in one line before position `at` copied to another, from the block of the first draft on."""
        size = self._limits.block_size
        for table in self._arrays.block_tables:
            span = slice(first // size, (at - 1) // size + 1)
            self._copies[0].extend(table[line, span].tolist())
            self._copies[1].extend(table[other, span].tolist())

    def _give_back(self, line: int) -> None:
        self._blocks += self._held.pop(line)
        self._lines.append(line)
