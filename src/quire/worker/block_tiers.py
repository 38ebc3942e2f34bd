"""Host memory, a disk and a server for KV blocks as one tier of the scheduler, and the worker's store.

A block is written to disk and server soon after it can be found: as many as take 2 % of a step, more while nothing
runs. So they have it when it gives way in the cache, and after the process has ended in whatever way. It is copied to
host memory when it gives way. It is read from memory if that has it, else from where that is fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from quire.core.tier import Name
from quire.worker.kept_blocks import KeptBlocks
from quire.worker.kv_file import U8
from quire.worker.swap_space import SwapSpace

_SHARE = 0.02  # of a step's time for copies of blocks to save, or one
_COPY_RATE = 5e9  # bytes a second, about
LOOK_SECONDS = 0.005  # at least between two looks at the server while a prompt waits for blocks
SAVE_SECONDS = 3.0  # for blocks that are kept nowhere yet, before the engine sleeps or ends


class BlockTiers:
    """See core.tier.Tier and worker.BlockStore. `ram` is None without host memory; `kept` are the others, the server
    last. An `eager` engine saves all that it has computed in the next step: others wait for it. `crowded`: the share of
    the cores that steps run on, and so of what readers take from them."""

    def __init__(
        self, ram: SwapSpace | None, kept: Sequence[KeptBlocks], *, eager: bool = False, crowded: float = 1.0
    ) -> None:
        self.ram, self.kept, self.fingerprint = ram, kept, kept[0].fingerprint
        self._eager, self._crowded = eager, crowded
        self.content: Callable[[int], U8]  # of a block of the cache: the worker's, once there is one
        self.sleeping = False  # what leaves the cache now is not damaged: it is kept
        self._unsaved: dict[Name, tuple[int, str]] = {}  # and the block and the tenant of each
        self._looked = time.monotonic()  # when the last step began
        self._seen = 0.0  # when `look` asked last
        self._turn = 0  # which of `kept` gives contents first

    @property
    def saving(self) -> bool:
        """Whether there are blocks in the cache that are kept nowhere."""
        return any(each.works and (bool(self._unsaved) or each.writes) for each in self.kept)

    @property
    def state(self) -> tuple[int, ...]:
        """What changes in the background: blocks that were kept, those that can be found, and whether that works."""
        return tuple([number for each in self.kept for number in (each.blocks_out, len(each), each.works)])

    def counts(self) -> dict[str, dict[str, int]]:
        """What metrics show of each that is not host memory, by its kind."""
        return {each.kind: each.counts() for each in self.kept}

    def published(self, name: Name, block: int, tenant: str) -> None:
        if any(each.works and not each.holds(name) for each in self.kept):
            self._unsaved[name] = block, tenant

    def moved(self, name: Name, block: int) -> None:
        if name in self._unsaved:
            self._unsaved[name] = block, self._unsaved[name][1]

    def saves(self, *, idle: bool) -> list[tuple[Name, int]]:
        now = time.monotonic()
        spent, self._looked = now - self._looked, now
        if not self._unsaved or not self._room:
            return []
        share = int(_SHARE * spent * _COPY_RATE / self.kept[0].block_bytes)
        return [*self._next(self._room if idle or self._eager else max(1, share))]

    @property
    def _room(self) -> int:
        return max([each.room for each in self.kept])

    def _next(self, most: int) -> Iterator[tuple[Name, int]]:
        """The blocks that were published first, at most so many, which `put` then brings."""
        while most > 0 and self._unsaved and self._room:
            name = next(iter(self._unsaved))
            block, tenant = self._unsaved.pop(name)
            if self._reserve(name, tenant):
                most -= 1
                yield name, block

    def _reserve(self, name: Name, tenant: str) -> bool:
        return sum([each.reserve(name, tenant) for each in self.kept]) > 0  # by all of them

    def withdrawn(self, name: Name, *, offered: bool) -> bool:
        unsaved = self._unsaved.pop(name, None)
        if not offered:
            if self.ram is not None:
                self.ram.withdrawn(name, offered=False)
            if not self.sleeping:
                for each in self.kept:
                    each.forget(name)
            return False
        wanted = self.ram is not None and self.ram.withdrawn(name, offered=True)
        return (unsaved is not None and self._reserve(name, unsaved[1])) or wanted

    def holds(self, name: Name) -> bool:
        if self.ram is not None and self.ram.holds(name):
            return True
        return any(each.holds(name) for each in self.kept)

    def look(self) -> bool:
        """See what other engines have kept on the server, now and then; whether it can be asked now."""
        now, server = time.monotonic(), self.kept[-1]
        if now - self._seen >= LOOK_SECONDS:
            self._seen = now
            server.look()
        return server.works

    def copy_seconds(self, name: Name) -> float:
        if self.ram is not None and self.ram.holds(name):
            return self.ram.copy_seconds(name)
        return min([each.copy_seconds for each in self.kept if each.holds(name)], default=0.0)

    def work_seconds(self, name: Name) -> float:
        if self.ram is not None and self.ram.holds(name):
            return self.ram.work_seconds(name)
        read = min([each.work_seconds for each in self.kept if each.holds(name)], default=0.0)
        return self._crowded * read + self.kept[0].block_bytes / _COPY_RATE if read else 0.0

    def put(self, name: Name, content: U8) -> None:
        if self.ram is not None:
            self.ram.put(name, content)
        for each in self.kept:
            if each.awaits(name):
                each.write(name, content)

    def comes(self, block: int, name: Name) -> bool:
        if self.ram is not None and self.ram.holds(name):
            return self.ram.comes(block, name)
        having = [each for each in self.kept if each.holds(name)]
        min(having or self.kept, key=lambda each: each.copy_seconds).read(block, name)
        return True

    def arrived(self, most: int) -> Sequence[tuple[int, U8 | None]]:
        """Of one of `kept` alone, so that what a step copies has the same bound however many there are."""
        for offset in range(len(self.kept)):
            found = self.kept[(self._turn + offset) % len(self.kept)].arrived(most)
            if found:
                self._turn += offset + 1
                return found
        return ()

    def get(self, name: Name) -> U8 | None:
        return None if self.ram is None else self.ram.get(name)

    def spent(self) -> float:
        return self._crowded * sum([each.spent() for each in self.kept])

    def save_all(self) -> None:
        """Have kept what can be found, for at most SAVE_SECONDS. No step may be in flight."""
        until = time.monotonic() + SAVE_SECONDS
        while self.saving and time.monotonic() < until:
            found = self.saves(idle=True)
            for name, block in found:
                self.put(name, self.content(block))
            if not found:
                time.sleep(0.001)  # until some were written

    def close(self) -> None:
        """Have kept what can be found, and end."""
        self.save_all()
        for each in self.kept:
            each.close()

    def clear(self) -> None:
        """Forget every block."""
        self._unsaved.clear()
        if self.ram is not None:
            self.ram.clear()
        for each in self.kept:
            each.clear()
