"""Room in memory that several models share: the one that was idle for longest leaves for another."""

from __future__ import annotations

import asyncio
from typing import Protocol


class PlaceHolder(Protocol):
    """A model that takes a place."""

    used: float  # when its last request ended

    def idle(self, seconds: float) -> bool:
        """Whether it is loaded, and has had nothing to do for so long."""

    async def leave(self) -> None:
        """Give back all memory, and its place with `ModelPlaces.give`."""


class ModelPlaces:
    """Places of `size` bytes for `count` models at a time. Belongs to one event loop."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._holders: list[PlaceHolder] = []
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    async def take(self, holder: PlaceHolder) -> None:
        """Return when the model has a place; another one leaves if need be, once it has nothing to do."""
        async with self._turn:
            while holder not in self._holders:
                if len(self._holders) < self.count:
                    self._holders.append(holder)
                    return
                self._changed.clear()
                idle = [other for other in self._holders if other.idle(0.0)]
                if idle:
                    await min(idle, key=lambda other: other.used).leave()
                else:
                    await self._changed.wait()

    def give(self, holder: PlaceHolder) -> None:
        """Its place is free, if it had one."""
        if holder in self._holders:
            self._holders.remove(holder)
            self._changed.set()

    def look(self) -> None:
        """A model may have become idle."""
        self._changed.set()
