"""A tier for the driver: the scheduler's view of the stored blocks, and copies of cells that are late and sometimes
fail.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from quire.cache_kinds import Move
from quire.core.tier import Name

Cell = tuple[int, int]  # cache group, hash of the prefix that was written
BEING_FILLED: Cell = (-1, -1)


@dataclass
class HostTier:
    """Keeps up to `capacity` blocks, the oldest go first; with `early` also those that need not give way. Moves into a
    block end up to three steps late, and of those a share of `losing` brings nothing."""

    size: int
    capacity: int = 40
    losing: float = 0.1
    early: bool = False
    fingerprint: bytes = b"driver"
    kept: OrderedDict[Name, None] = field(default_factory=OrderedDict)
    findable: Counter[Name] = field(default_factory=Counter)
    unsaved: dict[Name, int] = field(default_factory=dict)
    contents: dict[Name, list[Cell]] = field(default_factory=dict)
    filling: dict[int, tuple[int, Move]] = field(
        default_factory=dict
    )  # block -> steps still to wait, its move
    came: int = 0
    lost: int = 0
    last_hash: dict[bytes, int] = field(default_factory=dict)  # of a digest's prefix

    def __post_init__(self) -> None:
        self.random = random.Random(self.capacity)

    def published(self, name: Name, block: int, tenant: str) -> None:
        assert not self.findable[name], "it can be found already"
        self.findable[name] = 1
        self.unsaved[name] = block

    def moved(self, name: Name, block: int) -> None:
        assert self.findable[name], "it cannot be found"
        if name in self.unsaved:
            self.unsaved[name] = block

    def saves(self, *, idle: bool) -> list[tuple[Name, int]]:
        found = []
        while self.early and self.unsaved and (idle or not found):
            name, block = self.unsaved.popitem()
            if self.keep(name):
                found.append((name, block))
        return found

    def withdrawn(self, name: Name, *, offered: bool) -> bool:
        assert self.findable.pop(name), "it could not be found"
        self.unsaved.pop(name, None)
        return offered and self.random.random() >= 0.1 and self.keep(name)

    def keep(self, name: Name) -> bool:
        self.kept[name] = None
        self.kept.move_to_end(name)
        if len(self.kept) > self.capacity:
            self.kept.popitem(last=False)
        return True

    def holds(self, name: Name) -> bool:
        return name in self.kept

    def copy_seconds(self, name: Name) -> float:
        return 0.0

    work_seconds = copy_seconds

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
            ended[block] = (move.digest, move.group) in self.contents and self.random.random() >= self.losing
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
