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
        self._tables = arrays.block_tables
        self._lines: list[int] = []  # that are free
        self._blocks: list[int] = []
        self._held: dict[
            int, list[int]
        ] = {}  # of branches by their lines: a block of each table, place by place
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
        """Choose the tips of a tree's next pass, and give them lines for it; the drafts of the sequence in line `own`
        begin at position `first`. Tips for which there is no room are dropped. Returns whether there are any. `copy`
        must follow."""
        if not growth.go_on(tree, room):
            return False
        self._place(tree, own, first, first + tree.depth - 1)
        return bool(tree.tips)

    def rows(self, tree: GrowingTree, own: int, first: int) -> list[PassRow]:
        """The tips of a tree as rows of a pass."""
        at = first + tree.depth - 1
        return [PassRow(own, at, (tip.token,), True, tip.line) for tip in tree.tips]

    def fan_out(self, tree: GrowingTree, own: int, first: int, at: int) -> None:
        """Give the tips of a tree lines for a pass over their whole paths, from `first` up to `at`: nothing of them has
        been computed, and no branch goes on."""
        tree.tips[0].line = own
        for tip in tree.tips[1:]:
            self._fork(tip, own, self._line(own, first), own, first, first, at)
        tree.tips = [tip for tip in tree.tips if tip.line >= 0]

    def copy(self) -> None:
        """Give branches what is in the blocks of the paths that they leave."""
        if self._copies[0]:
            self._copy(*self._copies)
            self._copies = [], []

    def _place(self, tree: GrowingTree, own: int, first: int, at: int) -> None:
        """Lines for a pass at position `at`: the likeliest tip behind a path stays in its line."""
        tips = tree.tips
        if len(tips) == 1 and (tips[0].before is None or tips[0].before.line == own):
            tips[0].line, tree.own = own, tips[0]
            return
        goes_on, others = dict[int, Tip](), list[tuple[Tip, int]]()
        for tip in tips:
            line = own if tip.before is None else tip.before.line
            if line in goes_on:
                others.append((tip, line))
            elif line == own or self._reach(line, first, at):
                goes_on[line] = tip
                tip.line = line
        if others or own not in goes_on:
            free = [line for line in self._of.get(own, ()) if line not in goes_on]
            if own not in goes_on:
                free.append(own)
            for tip, before in others:
                line = free.pop() if free else self._line(own, first)
                self._fork(tip, before, line, own, first, at, at)
                if tip.line == own:
                    goes_on[own] = tip
            tree.tips = [tip for tip in tips if tip.line >= 0]
        tree.own = goes_on.get(own, tree.own)

    def _line(self, own: int, first: int) -> int:
        """Another line for a sequence, with what it has before the block of its first draft; -1 if there is none."""
        if not self._lines:
            return -1
        line, count = self._lines.pop(), first // self._limits.block_size
        for table in self._tables:
            table[line, :count] = table[own, :count]
        self._arrays.adapters[line] = self._arrays.adapters[own]
        self._held[line] = []
        self._of.setdefault(own, []).append(line)
        return line

    def _reach(self, line: int, first: int, at: int) -> bool:
        """Have blocks in a branch from that of the first draft up to position `at`; False if there are too few."""
        size, held, tables = self._limits.block_size, self._held[line], self._tables
        while (block := first // size + len(held) // len(tables)) <= at // size:
            if len(self._blocks) < len(tables):
                return False
            for table in tables:
                table[line, block] = self._blocks[-1]
                held.append(self._blocks.pop())
        return True

    def _fork(self, tip: Tip, before: int, line: int, own: int, first: int, stop: int, at: int) -> None:
        """Put a tip into a line, for a pass up to position `at`, with what line `before` has of drafts before `stop`,
        from the block of the first one on. Without room it is left without a line."""
        if line < 0 or (line != own and not self._reach(line, first, at)):
            return
        tip.line = line
        size = self._limits.block_size
        start, end = first // size, (stop - 1) // size + 1
        if start < end:
            for blocks, of in zip(self._copies, (before, line), strict=True):
                if of == own:
                    blocks.extend(
                        int(table[own, block]) for block in range(start, end) for table in self._tables
                    )
                else:
                    blocks.extend(self._held[of][: (end - start) * len(self._tables)])
