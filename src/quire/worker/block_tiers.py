"""Host memory and a disk for KV blocks as one tier of the scheduler, and the worker's store.

A block is written to the disk soon after it can be found: as many as take 2 % of a step, more while nothing runs. So
the disk has it when it gives way in the cache, and after the process has ended in whatever way. It is copied to host
memory when it gives way, and read from there if both have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from quire.core.tier import Name
from quire.worker.disk_tier import DiskTier
from quire.worker.kv_file import U8
from quire.worker.swap_space import SwapSpace

_SHARE = 0.02  # of a step's time for copies of blocks to save, or one
_COPY_RATE = 5e9  # bytes a second, about
SAVE_SECONDS = 3.0  # for blocks that the disk does not have yet, before the engine sleeps or ends


class BlockTiers:
    """See core.tier.Tier and worker.BlockStore. `ram` is None without host memory."""

    def __init__(self, ram: SwapSpace | None, disk: DiskTier) -> None:
        self.ram, self.disk, self.fingerprint = ram, disk, disk.fingerprint
        self.content: Callable[[int], U8]  # of a block of the cache: the worker's, once there is one
        self.sleeping = False  # what leaves the cache now is not damaged: the disk keeps it
        self._unsaved: dict[Name, int] = {}  # and the block of each
        self._looked = time.monotonic()  # when the last step began

    @property
    def saving(self) -> bool:
        """Whether there are blocks in the cache that the disk has not."""
        return not self.disk.error and (bool(self._unsaved) or self.disk.writes)

    def published(self, name: Name, block: int) -> None:
        if not self.disk.error and not self.disk.holds(name):
            self._unsaved[name] = block

    def moved(self, name: Name, block: int) -> None:
        if name in self._unsaved:
            self._unsaved[name] = block

    def saves(self, *, idle: bool) -> list[tuple[Name, int]]:
        now = time.monotonic()
        spent, self._looked = now - self._looked, now
        if not self._unsaved or self.disk.error:
            return []
        share = int(_SHARE * spent * _COPY_RATE / self.disk.block_bytes)
        return [*self._next(self.disk.room if idle else max(1, share))]

    def _next(self, most: int) -> Iterator[tuple[Name, int]]:
        """The blocks that were published first, at most so many, which `put` then brings."""
        while most > 0 and self._unsaved and self.disk.room:
            name = next(iter(self._unsaved))
            block = self._unsaved.pop(name)
            if self.disk.reserve(name):
                most -= 1
                yield name, block

    def withdrawn(self, name: Name, *, offered: bool) -> bool:
        unsaved = self._unsaved.pop(name, None) is not None
        if not offered:
            if self.ram is not None:
                self.ram.withdrawn(name, offered=False)
            if not self.sleeping:
                self.disk.forget(name)
            return False
        wanted = self.ram is not None and self.ram.withdrawn(name, offered=True)
        return (unsaved and self.disk.reserve(name)) or wanted

    def holds(self, name: Name) -> bool:
        return (self.ram is not None and self.ram.holds(name)) or self.disk.holds(name)

    def copy_seconds(self, name: Name) -> float:
        if self.ram is not None and self.ram.holds(name):
            return self.ram.copy_seconds(name)
        return self.disk.copy_seconds

    def put(self, name: Name, content: U8) -> None:
        if self.ram is not None:
            self.ram.put(name, content)
        if self.disk.awaits(name):
            self.disk.write(name, content)

    def comes(self, block: int, name: Name) -> bool:
        if self.ram is not None and self.ram.holds(name):
            return False
        self.disk.read(block, name)
        return True

    def arrived(self) -> Sequence[tuple[int, U8 | None]]:
        return self.disk.arrived()

    def get(self, name: Name) -> U8 | None:
        return None if self.ram is None else self.ram.get(name)

    def save_all(self) -> None:
        """Copy what can be found to the disk, for at most SAVE_SECONDS. No step may be in flight."""
        until = time.monotonic() + SAVE_SECONDS
        while self.saving and time.monotonic() < until:
            found = self.saves(idle=True)
            for name, block in found:
                self.put(name, self.content(block))
            if not found:
                time.sleep(0.001)  # until the disk has taken some

    def close(self) -> None:
        """Have the disk keep what can be found, and end."""
        self.save_all()
        self.disk.close()

    def clear(self) -> None:
        """Forget every block."""
        self._unsaved.clear()
        if self.ram is not None:
            self.ram.clear()
        self.disk.clear()
