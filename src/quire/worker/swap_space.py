"""Host memory for KV blocks that had to give way: a tier of the scheduler, and the worker's store, in one.

When a sequence is preempted its blocks stay findable until others need their room. Then their content is copied here,
and copied back when the sequence, or another one with the same prefix, starts: if that is cheaper than computing it, by
the cost model. The block that was used longest ago makes room.

Besides the places that `--swap-space` asks for there may be borrowed ones, whose number changes: the memory of a place
that is given back goes to the system at once, with the block in it, which no sequence holds.
"""

from __future__ import annotations

import mmap
import time
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from quire.core.tier import Name

_ENTRY_BYTES = 512  # what a block takes besides its content
_RECENT = 0.1  # of the latest copy in the mean


def place_bytes(block_bytes: int) -> int:
    """What the place of a block takes."""
    return _pitch(block_bytes) + _ENTRY_BYTES


def _pitch(block_bytes: int) -> int:
    return -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class SwapSpace:
    """Places for `blocks` blocks of `block_bytes` bytes, and later for up to `most`; see core.tier.Tier and
    worker.BlockStore."""

    fingerprint = b"swap"  # it ends with its engine, so nothing else can be in it

    def __init__(self, blocks: int, block_bytes: int, most: int = 0) -> None:
        most = max(blocks, most)
        if most < 1:
            raise ValueError(f"swap_space: has no room for a block of {block_bytes} bytes")
        self.own = self.room = blocks  # places without the borrowed ones, and with them
        self.most = most
        self._size, self._pitch = block_bytes, _pitch(block_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._memory = mmap.mmap(-1, most * self._pitch, flags=flags)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a place alone is given back, and no more than it is touched
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._content: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8).reshape(most, self._pitch)
        self._places: OrderedDict[Name, int] = OrderedDict()  # least recently used first
        self._awaited: set[Name] = set()  # blocks with a place, whose content was not put yet
        self._free: list[int] = []  # places without a block whose memory was touched
        self._bare: list[int] = []  # those whose memory was given back
        self._first_new = 0  # places from here on were never used
        self.refused = 0  # blocks for which there was no place without another one's leaving
        self._seconds = 0.0  # to copy a block, both ways the same: a moving mean
        self.blocks_out = self.blocks_in = 0

    def __len__(self) -> int:
        """Blocks kept."""
        return len(self._places)

    @property
    def place_bytes(self) -> int:
        """What a place takes."""
        return place_bytes(self._size)

    @property
    def backed(self) -> int:
        """Places whose memory was touched and not given back."""
        return len(self._places) + len(self._free)

    def resize(self, room: int) -> None:
        """Have so many places. Those that are too many are given back at once, empty ones first, then those of the
        blocks that were used longest ago."""
        self.room = min(room, self.most)
        while self.backed > self.room:
            place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            self._memory.madvise(mmap.MADV_DONTNEED, place * self._pitch, self._pitch)
            self._bare.append(place)

    def clear(self) -> None:
        """Forget every block."""
        self._free += self._places.values()
        self._places.clear()

    def published(self, name: Name, block: int, tenant: str) -> None:
        """Nothing changes: a copy stays, as the block may have to give way again."""

    def moved(self, name: Name, block: int) -> None:
        """Nothing changes."""

    def saves(self, *, idle: bool) -> tuple[()]:  # noqa: ARG002
        """Blocks are copied when they give way."""
        return ()

    def withdrawn(self, name: Name, *, offered: bool) -> bool:
        """Whether to copy the block out; one that may be damaged is forgotten here, too."""
        if not offered:
            place = self._places.pop(name, None)
            if place is not None:
                self._free.append(place)
            return False
        if name in self._places:
            self._places.move_to_end(name)
            return False
        place = self._empty_place()
        if place is None:
            self.refused += 1
            if not self._places:
                return False
            place = self._places.popitem(last=False)[1]
        self._places[name] = place
        self._awaited.add(name)
        return True

    def _empty_place(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self.backed >= self.room:
            return None
        if self._bare:
            return self._bare.pop()
        self._first_new += 1
        return self._first_new - 1

    def holds(self, name: Name) -> bool:
        return name in self._places

    def copy_seconds(self, name: Name) -> float:  # noqa: ARG002
        return self._seconds

    work_seconds = copy_seconds

    def put(self, name: Name, content: NDArray[np.uint8]) -> None:
        """Store a content, unless its place was given away since it was asked for."""
        self._awaited.discard(name)
        place = self._places.get(name)
        if place is not None:
            start = time.perf_counter()
            self._content[place, : self._size] = content
            self._timed(2 * (time.perf_counter() - start))  # it was read from the executor just as long
            self.blocks_out += 1

    def comes(self, block: int, name: Name) -> bool:  # noqa: ARG002
        """A content is there or not: nothing comes later. It counts as used now: `get` may have to wait."""
        if name in self._places:
            self._places.move_to_end(name)
        return False

    def arrived(self, most: int) -> tuple[()]:  # noqa: ARG002
        return ()

    def spent(self) -> float:
        """Nothing is read beside steps."""
        return 0.0

    def get(self, name: Name) -> NDArray[np.uint8] | None:
        """A content; None if it is not kept any more, or not yet. Valid until the next `put`."""
        place = self._places.get(name)
        if place is None or name in self._awaited:
            return None
        self._places.move_to_end(name)
        self.blocks_in += 1
        content: NDArray[np.uint8] = self._content[place, : self._size]
        return content

    def _timed(self, seconds: float) -> None:
        self._seconds += (seconds - self._seconds) * (_RECENT if self._seconds else 1.0)
