"""Trees of drafts in a step: rows that share blocks.

A tree is cut into paths. The first lies in the blocks of its sequence, like a chain of drafts. Each further path is a
row of the step of its own, a branch. Its line of the block tables is that of the path which it leaves, up to the
block of its first draft; from there on it has blocks that belong to the step alone:

    parents 0 1 2 2 3      sequence  … t │ a b c e │     positions 6, 7 │ 8 …  (t is the last known token)
    a ─ b ─ c ─ e          branch        │     d   │     in that block: a b as the sequence, d in place of c
            └ d

A block has keys and values of whole tiles, so before the step the branch's first block is copied from the sequence's if
earlier steps wrote to it, and what the step computes for the drafts above is written to both (`StepArrays.mirrors`).
Every query then finds what a plain decode would leave it, in the same places: its sums are the same to the last bit. If
the path that is accepted ends in a branch, its blocks are copied to those of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.draft_paths import draft_depths
from quire.executor.base import Limits, StepArrays
from quire.records import dataclass
from quire.types import ScheduledSeq


def cut(parents: tuple[int, ...]) -> list[list[int]]:
    """The paths of a tree, as numbers of drafts: each goes down by first children from a draft that none before has."""
    first: dict[int, int] = {}
    for draft, parent in enumerate(parents, 1):
        first.setdefault(parent, draft)
    paths: list[list[int]] = []
    taken: set[int] = set()
    for start in range(1, len(parents) + 1):
        if start not in taken:
            path = [start]
            while path[-1] in first:
                path.append(first[path[-1]])
            taken.update(path)
            paths.append(path)
    return paths


@dataclass(slots=True)
class PlantedTree:
    """A row with a tree of drafts in a step. Draft 0 is the last known token, at position `root`; its logits are row
    `place`, those of the drafts follow. Of each draft: its depth, its path, its token in the step. Of each path: its
    line of the block tables.
    """

    item: ScheduledSeq
    parents: tuple[int, ...]
    row: int
    place: int
    root: int
    paths: list[list[int]]
    depths: list[int]
    path_of: list[int]
    tokens: list[int]
    lines: list[int]

    def children(self) -> dict[tuple[int, int], int]:
        """The place of each draft, by the place of its parent and its token. Of equal drafts the first counts."""
        found: dict[tuple[int, int], int] = {}
        drafts = self.item.token_ids[-self.item.drafts :]
        for draft, (parent, token) in enumerate(zip(self.parents, drafts, strict=True), 1):
            found.setdefault((self.place + parent, token), self.place + draft)
        return found


def plant(item: ScheduledSeq, row: int, line: int, start: int, place: int) -> tuple[PlantedTree, list[int]]:
    """The tree of a row that begins at token `start`, and the row's own tokens: those known, then the first path."""
    assert item.parents is not None
    parents, known = item.parents, len(item.token_ids) - item.drafts
    paths, depths, path_of = cut(parents), draft_depths(parents), [0] * (len(parents) + 1)
    for number, path in enumerate(paths):
        for draft in path:
            path_of[draft] = number
    tokens = [0] * len(depths)
    for at, draft in enumerate((0, *paths[0])):
        tokens[draft] = start + known - 1 + at
    drafts = item.token_ids[known:]
    root = item.start + known - 1
    tree = PlantedTree(item, parents, row, place, root, paths, depths, path_of, tokens, [line])
    return tree, item.token_ids[:known] + [drafts[draft - 1] for draft in paths[0]]


class StepBranches:
    """The branches of a step: rows behind those of sequences, lines behind those of slots, blocks behind the others.

    `copies` are the blocks to copy before the step, and to which.
    """

    def __init__(self, arrays: StepArrays, limits: Limits) -> None:
        self._arrays, self._limits = arrays, limits
        self._mirrors = 0
        self.copies: tuple[list[int], list[int]] = [], []

    def grow(self, trees: list[PlantedTree], row: int, start: int) -> tuple[int, int]:
        """Fill the step's arrays from a row and a token on; returns where both end."""
        arrays, line, block = self._arrays, self._limits.max_rows, self._limits.num_blocks
        self.copies, self._mirrors = ([], []), 0
        for tree in trees:
            known = len(tree.item.token_ids) - tree.item.drafts - 1
            for path in tree.paths[1:]:
                first = tree.root + tree.depths[path[0]]
                arrays.slots[row], arrays.query_start[row] = line, start
                arrays.adapters[line] = arrays.adapters[tree.lines[0]]
                for at, draft in enumerate(path):
                    tree.tokens[draft] = start + at
                    arrays.token_ids[start + at] = tree.item.token_ids[known + draft]
                    arrays.positions[start + at] = first + at
                block = self._add(tree, path, line, block)
                tree.lines.append(line)
                row, line, start = row + 1, line + 1, start + len(path)
            for at, token in enumerate(tree.tokens):
                arrays.logit_rows[tree.place + at] = token
        arrays.query_start[row] = start
        arrays.mirrors[self._mirrors] = 0
        return row, start

    def clear(self) -> None:
        """Take back what only the step that ran may see."""
        if self._mirrors:
            self._mirrors = 0
            self._arrays.mirrors[0] = 0

    def accepted(self, ends: Iterable[tuple[PlantedTree, int]]) -> tuple[list[int], list[int]]:
        """Blocks to copy after the step, and to which, if the sequences of trees go on from these drafts."""
        size, blocks, targets = self._limits.block_size, [], []
        for tree, last in ends:
            if number := tree.path_of[last]:
                span = slice((tree.root + 1) // size, (tree.root + tree.depths[last]) // size + 1)
                for table in self._arrays.block_tables:
                    there, here = table[tree.lines[number], span], table[tree.lines[0], span]
                    blocks += there[there != here].tolist()
                    targets += here[there != here].tolist()
        return blocks, targets

    def _add(self, tree: PlantedTree, path: list[int], line: int, block: int) -> int:
        """Give a path a line, its blocks from `block` on; returns where they end."""
        size, item, parent = self._limits.block_size, tree.item, tree.parents[path[0] - 1]
        first = tree.root + tree.depths[path[0]]
        stop = first + len(path)
        left, own, end = tree.lines[tree.path_of[parent]], first // size, (stop - 1) // size + 1
        for table in self._arrays.block_tables:
            table[line, :own] = table[left, :own]
            table[line, own:end] = range(block, block + end - own)
            if own * size < item.start:
                self.copies[0].append(int(table[tree.lines[0], own]))
                self.copies[1].append(block)
            block += end - own
        self._mirror(tree, parent, max(own * size, item.start), line, stop)
        return block

    def _mirror(self, tree: PlantedTree, draft: int, low: int, line: int, stop: int) -> None:
        """Have a draft and those above it, down to position `low`, written to a line: as stretches of rows."""
        while (position := tree.root + tree.depths[draft]) >= low:
            path = tree.path_of[draft]
            top = tree.paths[path][0]
            begins = tree.root + tree.depths[top] if path else tree.item.start
            end = tree.tokens[draft] + 1
            begin = end - 1 - (position - max(low, begins))
            self._arrays.mirrors[self._mirrors] = begin, end, line, stop
            self._mirrors += 1
            if not path:
                break
            draft = tree.parents[top - 1]
