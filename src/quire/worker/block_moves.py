"""Copies of KV blocks between an executor and a store.

A content that leaves is copied at once, since its block may have a new owner in the same step. Contents come in as fast
as they can while no sequence runs. Beside sequences all that they take, reading and checking in other threads too, is a
part of the time of steps: what a block takes above the part of its step, the next steps have less. Short steps take one
block each. So who decodes does not wait for the prompts of others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.cache_kinds import Move
from quire.core.tier import FILL_SHARE, SHORT_STEP, Name
from quire.executor.base import Runnable
from quire.worker.kv_file import U8


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

    def spent(self) -> float:
        """What reading contents took from steps since the last call, seconds."""


class BlockMoves:
    """The copies of one worker. Calls come from its thread."""

    def __init__(self, executor: Runnable, store: BlockStore) -> None:
        self._executor, self._store = executor, store
        self._kept: deque[Move] = deque()  # contents that the store has at hand
        self._coming = 0  # contents that the store reads
        self._left = 0.0  # seconds that blocks may take yet; below 0: what they took above their part
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
        filled: dict[int, bool] = {}
        self._left = min(self._left, 0.0) + FILL_SHARE * step - self._store.spent()
        while (self._left > 0 or (step < SHORT_STEP and not filled)) and self._fill_one(filled):
            pass
        return filled

    def _fill_one(self, filled: dict[int, bool]) -> bool:
        """Copy a content that is at hand, or one that has come, in turns; whether there was one."""
        self._kept_first = not self._kept_first  # so that none of the two waits for the end of the other
        takes = self._take_kept, self._take_arrived
        return any(take(filled) for take in (takes if self._kept_first else takes[::-1]))

    def _take_kept(self, filled: dict[int, bool]) -> bool:
        if not self._kept:
            return False
        move = self._kept.popleft()
        self._fill(move.block, self._store.get((move.digest, move.group)), filled)
        return True

    def _take_arrived(self, filled: dict[int, bool]) -> bool:
        found = self._store.arrived(1) if self._coming else ()
        self._coming -= len(found)
        for block, content in found:
            self._fill(block, content, filled)
        return bool(found)

    def content(self, block: int) -> U8:
        """A copy of what is in a KV block."""
        content = np.empty(self._executor.block_bytes, np.uint8)
        self._executor.read_blocks([block], content[None])
        return content

    def _fill(self, block: int, content: U8 | None, filled: dict[int, bool]) -> None:
        filled[block] = content is not None
        if content is not None:
            start = time.perf_counter()
            self._executor.write_blocks([block], content[None])
            self._left -= time.perf_counter() - start
