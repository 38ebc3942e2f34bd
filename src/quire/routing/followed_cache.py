"""What one server has cached, as it says itself: a snapshot, then numbered batches of changes.

A batch that does not follow the one before, or a part of a snapshot that is missing, makes what is known wrong: then
nothing is, until a snapshot has come again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.records import dataclass

Hash = int  # of a block and all before it; 0 for none


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Blocks, each with the one before it, as of batch `number`. Hashes of two `space`s have nothing in common."""

    epoch: str
    number: int
    part: int
    parts: int
    space: str
    block_size: int
    blocks: Sequence[tuple[Hash, Hash]]


@dataclass(frozen=True, slots=True)
class FollowedChange:
    """Blocks that came, each with the one before it, or that are gone; neither of them: all are gone."""

    stored: Sequence[tuple[Hash, Hash]] = ()
    removed: Sequence[Hash] = ()


class FollowedCache:
    """The blocks of one server; see above. `current`: they are known as of batch `number`."""

    def __init__(self) -> None:
        self.blocks: dict[Hash, Hash] = {}
        self.space, self.block_size = "", 0
        self.number = -1
        self.current = False
        self._coming: list[SnapshotPart] = []

    def snapshot(self, part: SnapshotPart) -> None:
        """Take a part of a snapshot. Parts of another one, or out of order, are dropped with what came of theirs."""
        coming = self._coming
        follows = coming and (coming[-1].epoch, coming[-1].number) == (part.epoch, part.number)
        if part.part == 0:
            coming.clear()
        elif not follows or part.part != len(coming):
            coming.clear()
            return
        self.current = False
        coming.append(part)
        if len(coming) == part.parts:
            self.blocks = dict(pair for each in coming for pair in each.blocks)
            self.space, self.block_size, self.number = part.space, part.block_size, part.number
            self.current = True
            coming.clear()

    def batch(self, number: int, changes: Iterable[FollowedChange]) -> bool:
        """Take a batch; false if a snapshot is needed."""
        if not self.current:
            return False
        if number != self.number + 1:
            if number <= self.number:
                return True  # it is in the snapshot, or came twice
            self.lose()
            return False
        for change in changes:
            if change.removed:
                for name in change.removed:
                    self.blocks.pop(name, None)
            elif change.stored:
                self.blocks.update(change.stored)
            else:
                self.blocks.clear()
        self.number = number
        return True

    def check(self, number: int) -> bool:
        """Whether all is known as of the server's last batch; if not, a snapshot is needed."""
        if self.current and number != self.number:
            self.lose()
        return self.current

    def lose(self) -> None:
        """Nothing is known any more."""
        self.current = False
        self.blocks = {}
        self._coming.clear()
