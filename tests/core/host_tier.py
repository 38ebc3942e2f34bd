"""A tier for the driver: the scheduler's view of the stored blocks, and copies of cells that are late and sometimes
fail.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from quire.cache_kinds import Move

Cell = tuple[int, int]  # cache group, hash of the prefix that was written
Name = tuple[bytes, int]  # digest, cache group
BEING_FILLED: Cell = (-1, -1)


@dataclass
class HostTier:
    """Keeps up to `capacity` blocks, the oldest go first. Moves into a block end up to three steps late, and of those
    a share of `losing` brings nothing."""

    size: int
    capacity: int = 40
    losing: float = 0.1
    fingerprint: bytes = b"driver"
    copy_seconds: float = 0.0
    kept: OrderedDict[Name, None] = field(default_factory=OrderedDict)
    findable: Counter[Name] = field(default_factory=Counter)
    contents: dict[Name, list[Cell]] = field(default_factory=dict)
    filling: dict[int, tuple[int, Move]] = field(
        default_factory=dict
    )  # block -> steps still to wait, its move
    came: int = 0
    lost: int = 0
    last_hash: dict[bytes, int] = field(default_factory=dict)  # of a digest's prefix

    def __post_init__(self) -> None:
        self.random = random.Random(self.capacity)

    def published(self, digest: bytes, group: int) -> None:
        assert not self.findable[digest, group], "it can be found already"
        self.findable[digest, group] = 1

    def withdrawn(self, digest: bytes, group: int, *, offered: bool) -> bool:
        assert self.findable.pop((digest, group)), "it could not be found"
        if not offered or self.random.random() < 0.1:
            return False
        self.kept[digest, group] = None
        self.kept.move_to_end((digest, group))
        if len(self.kept) > self.capacity:
            self.kept.popitem(last=False)
        return True

    def holds(self, digest: bytes, group: int) -> bool:
        return (digest, group) in self.kept

    def move(self, cells: dict[tuple[int, int], Cell], moves: list[Move]) -> dict[int, bool]:
        """One step: returns the moves that have ended, of earlier steps and of `moves`."""
        ended = {}
        for move in moves:
            places = [(move.block, place) for place in range(self.size)]
            if move.fill:
                assert move.block not in self.filling, "a block is filled twice at once"
                self.filling[move.block] = self.random.randint(0, 3), move
                cells.update(dict.fromkeys(places, BEING_FILLED))
            else:
                assert move.block not in self.filling, "a block is copied out while it is filled"
                content = self.contents[move.digest, move.group] = [cells[place] for place in places]
                self.check(move, content)
        for block, (wait, move) in list(self.filling.items()):
            if wait:
                self.filling[block] = wait - 1, move
                continue
            del self.filling[block]
            ended[block] = self.random.random() >= self.losing
            self.came += ended[block]
            self.lost += not ended[block]
            if ended[block]:
                content = self.contents[move.digest, move.group]
                self.check(move, content)
                cells.update({(block, place): cell for place, cell in enumerate(content)})
        return ended

    def check(self, move: Move, content: list[Cell]) -> None:
        """The content is a block's, of that group and of the prefix that the digest has always stood for."""
        assert all(group == move.group for group, _ in content)
        assert self.last_hash.setdefault(move.digest, content[-1][1]) == content[-1][1]
