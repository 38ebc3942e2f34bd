"""Host memory for KV blocks that had to give way: a tier of the scheduler, and the worker's store, in one.

When a sequence is preempted its blocks stay findable until others need their room. Then their content is copied here,
and copied back when the sequence, or another one with the same prefix, starts: if that is cheaper than computing it, by
the cost model. The memory is allocated once. The block that was used longest ago makes room.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

ENTRY_BYTES = 512  # what a block takes besides its content
_RECENT = 0.1  # of the latest copy in the mean


class SwapSpace:
    """Places for `blocks` blocks of `block_bytes` bytes; see core.tier.Tier and worker.BlockStore."""

    fingerprint = b"swap"  # it ends with its engine, so nothing else can be in it

    def __init__(self, blocks: int, block_bytes: int) -> None:
        if blocks < 1:
            raise ValueError(f"swap_space: has no room for a block of {block_bytes} bytes")
        self._content: NDArray[np.uint8] = np.empty((blocks, block_bytes), np.uint8)
        self._places: OrderedDict[tuple[bytes, int], int] = OrderedDict()  # least recently used first
        self._free = list(range(blocks - 1, -1, -1))
        self.copy_seconds = 0.0  # moving mean for a block, both ways the same
        self.blocks_out = self.blocks_in = 0

    def __len__(self) -> int:
        """Blocks kept."""
        return len(self._places)

    def published(self, digest: bytes, group: int) -> None:
        """Nothing changes: a copy stays, as the block may have to give way again."""

    def withdrawn(self, digest: bytes, group: int, *, offered: bool) -> bool:
        """Whether to copy the block out; one that may be damaged is forgotten here, too."""
        name = digest, group
        if not offered:
            place = self._places.pop(name, None)
            if place is not None:
                self._free.append(place)
            return False
        if name in self._places:
            self._places.move_to_end(name)
            return False
        self._places[name] = self._free.pop() if self._free else self._places.popitem(last=False)[1]
        return True

    def holds(self, digest: bytes, group: int) -> bool:
        return (digest, group) in self._places

    def put(self, digest: bytes, group: int, content: NDArray[np.uint8]) -> None:
        """Store a content, unless its place was given away since it was asked for."""
        place = self._places.get((digest, group))
        if place is not None:
            start = time.perf_counter()
            self._content[place] = content
            self._timed(2 * (time.perf_counter() - start))  # it was read from the executor just as long
            self.blocks_out += 1

    def get(self, digest: bytes, group: int) -> NDArray[np.uint8] | None:
        """A content; None if it is not kept any more. Valid until the next `put`."""
        place = self._places.get((digest, group))
        if place is None:
            return None
        self._places.move_to_end((digest, group))
        self.blocks_in += 1
        content: NDArray[np.uint8] = self._content[place]
        return content

    def _timed(self, seconds: float) -> None:
        self.copy_seconds += (seconds - self.copy_seconds) * (_RECENT if self.copy_seconds else 1.0)
