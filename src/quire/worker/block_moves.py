"""Copies of KV blocks between an executor and a store.

A content that leaves is copied at once, since its block may have a new owner in the same step. Contents come in as fast
as they can while no sequence runs. Beside sequences they take a part of a step's time, or one block: who decodes does
not wait for the prompts of others.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.cache_kinds import Move
from quire.core.tier import FILL_SHARE, Name
from quire.executor.base import Runnable
from quire.worker.kv_file import U8

_RECENT = 0.1  # of the latest copy in the mean


class BlockStore(Protocol):
    """Contents of blocks outside of the executor, by their names: the worker's side of a tier."""

    def put(self, name: Name, content: U8) -> None:
        """Store a content; the store owns it from now on."""

    def comes(self, block: int, name: Name) -> bool:
        """Whether a content for a block comes later, by `arrived`, and not by `get`."""

    def arrived(self, most: int) -> Sequence[tuple[int, U8 | None]]:
        """Blocks whose content has come, at most so many, or None for those that were lost. Valid until the next
        call."""

    def get(self, name: Name) -> U8 | None:
        """A content that was put; None if it is not kept any more."""


class BlockMoves:
    """The copies of one worker. Calls come from its thread."""

    def __init__(self, executor: Runnable, store: BlockStore) -> None:
        self._executor, self._store = executor, store
        self._kept: deque[Move] = deque()  # contents that the store has at hand
        self._coming = 0  # contents that the store reads
        self._seconds = 0.0  # of a copy: a moving mean
        self._kept_first = False

    def __bool__(self) -> bool:
        """Whether contents are still to come in."""
        return bool(self._kept or self._coming)

    def run(self, moves: Sequence[Move], step: float) -> dict[int, bool]:
        """Copy blocks out, in order, and as many in as a step of so many seconds has time for; returns the blocks that
        were to be filled, and whether they were."""
        for move in moves:
            name = move.digest, move.group
            if not move.fill:
                self._store.put(name, self.content(move.block))
            elif self._store.comes(move.block, name):
                self._coming += 1
            else:
                self._kept.append(move)
        most, filled = self._most(step), dict[int, bool]()
        self._kept_first = not self._kept_first  # so that none of the two waits for the end of the other
        for take in (self._take_kept, self._take_arrived)[:: 1 if self._kept_first else -1]:
            most -= take(most, filled)
        return filled

    def _take_kept(self, most: int, filled: dict[int, bool]) -> int:
        """Copy contents that are at hand; how many."""
        copied = 0
        while self._kept and copied < most:
            move = self._kept.popleft()
            copied += self._fill(move.block, self._store.get((move.digest, move.group)), filled)
        return copied

    def _take_arrived(self, most: int, filled: dict[int, bool]) -> int:
        """Copy contents that have come; how many."""
        copied = 0
        while self._coming and copied < most and (found := self._store.arrived(most - copied)):
            self._coming -= len(found)
            copied += sum([self._fill(block, content, filled) for block, content in found])
        return copied

    def content(self, block: int) -> U8:
        """A copy of what is in a KV block."""
        content = np.empty(self._executor.block_bytes, np.uint8)
        self._executor.read_blocks([block], content[None])
        return content

    def _most(self, step: float) -> int:
        """Contents that come in at most."""
        if math.isinf(step):
            return 2**31
        return max(1, int(FILL_SHARE * step / self._seconds)) if self._seconds else 1

    def _fill(self, block: int, content: U8 | None, filled: dict[int, bool]) -> bool:
        filled[block] = content is not None
        if content is None:
            return False
        start = time.perf_counter()
        self._executor.write_blocks([block], content[None])
        seconds = time.perf_counter() - start
        self._seconds += (seconds - self._seconds) * (_RECENT if self._seconds else 1.0)
        return True
