"""How an engine comes to rest: it stops or sleeps, after what runs has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sized

from quire.engine.api import EngineState, EngineUnavailableError
from quire.engine.cache_log import CacheLog
from quire.engine.front.grammars import GrammarService
from quire.engine.host.client import EngineClient

logger = logging.getLogger("quire.engine")


class EngineEnds:
    """The part of an AsyncEngine that ends what runs, over what that holds."""

    _client: EngineClient | None
    _drained: asyncio.Event | None
    _live: Sized
    _grammars: GrammarService
    _cache: CacheLog | None

    @property
    def state(self) -> EngineState:
        raise NotImplementedError

    def _end_all(self, reason: str) -> None:
        raise NotImplementedError

    def _close_texts(self) -> None:
        raise NotImplementedError

    async def finish(self, drain_seconds: float) -> None:
        """Refuse new requests, let running ones finish for so long, and end the rest: the first half of `stop`."""
        if self._client is None or self._drained is None:
            return
        self._client.drain()
        await self._drain(drain_seconds)
        self._end_all("the server is shutting down")

    async def stop(self, drain_seconds: float) -> None:
        await self.finish(drain_seconds)
        if self._client is None or self._drained is None:
            return
        await self._client.stop()
        self._grammars.close()
        self._close_texts()

    async def rest(self, drain_seconds: float) -> None:
        """Refuse new requests, let running ones finish for so long, and end the rest: the first half of `sleep`."""
        if self._client is None or self._drained is None:
            raise EngineUnavailableError("the engine is loading")
        self._client.rest()
        await self._drain(drain_seconds)
        self._end_all("the model was put to sleep")

    async def give_back(self, level: int) -> None:
        """Give memory back, at level 1 cached prefixes and the pages of mapped weights, at level 2 the process."""
        assert self._client is not None
        await self._client.give_back(level)
        if self._cache is not None and level == 2:
            self._cache.cleared()

    async def sleep(self, level: int, drain_seconds: float) -> None:
        """`rest`, then `give_back`. Raises EngineUnavailableError unless the engine is ready."""
        await self.rest(drain_seconds)
        await self.give_back(level)

    async def wake(self) -> None:
        if self._client is not None and self.state is EngineState.SLEEPING:
            await self._client.wake()

    async def _drain(self, seconds: float) -> None:
        """Wait until nothing runs, at most so long."""
        assert self._drained is not None
        if not self._live or seconds <= 0:
            return
        self._drained.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._drained.wait()
        except TimeoutError:
            logger.warning("%d requests still ran after %g s", len(self._live), seconds)
