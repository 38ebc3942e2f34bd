"""Requests whose output nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from quire.config.serving import ServingConfig
from quire.engine.front.stream import LiveRequest
from quire.types import QuireError


class SlowReaders:
    """Ends the requests of slow readers, with `end`."""

    def __init__(self, serving: ServingConfig, end: Callable[[LiveRequest, QuireError | None], None]) -> None:
        self._serving, self._end = serving, end

    def look(self, lives: Iterable[LiveRequest], now: float, loop: asyncio.AbstractEventLoop) -> None:
        """Readers that were woken are served first: after this process was suspended there may be some."""
        if late := [live for live in lives if self._unread(live, now)]:
            loop.call_soon(self._end_unread, late, now)

    def _end_unread(self, late: list[LiveRequest], now: float) -> None:
        for live in late:
            if error := self._unread(live, now):
                self._end(live, error)

    def _unread(self, live: LiveRequest, now: float) -> QuireError | None:
        return live.left_unread(now, self._serving.reader_timeout, self._serving.reader_tokens)
