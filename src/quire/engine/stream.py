"""A running request as its caller sees it: deltas to iterate over, merged while nobody reads them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

from quire.engine.api import GenerateAsk, Sink, StreamDelta
from quire.engine.output import Following
from quire.types import QuireError

logger = logging.getLogger("quire.engine")


class Live:
    """The engine's side of a stream. A sample has at most one unread delta: later ones are added to it.

    So what a slow reader costs is bounded by its own output, and a step never waits for anybody.
    """

    __slots__ = (
        "ask",
        "cached_tokens",
        "error",
        "following",
        "handle",
        "idle",
        "output",
        "pending",
        "request_id",
        "sink",
        "timers",
        "unread",
        "unread_since",
        "waiter",
    )

    def __init__(self, handle: int, ask: GenerateAsk, following: Following) -> None:
        self.handle = handle
        self.ask = ask
        self.following = following
        output = following.output
        self.request_id = output.request_id
        self.output = output
        self.pending: dict[int, StreamDelta] = {}
        self.unread = 0  # tokens
        self.unread_since = 0.0
        self.waiter: asyncio.Future[None] | None = None
        self.idle = False  # a reader waits and has not been woken
        self.error: QuireError | None = None
        self.cached_tokens = 0
        self.sink: Sink | None = None
        self.timers: list[asyncio.TimerHandle] = []

    def push(self, delta: StreamDelta, now: float) -> None:
        """Add what a step made."""
        if not self.pending:
            # an idle reader is not woken for what the sink takes: that would cost more than the rest of a token
            if self.idle and self.sink is not None and self._offer(self.sink, delta):
                return
            self.unread_since = now
        self.unread += len(delta.token_ids)
        waiting = self.pending.get(delta.index)
        if waiting is None:
            self.pending[delta.index] = delta
        else:
            _merge(waiting, delta)
        self.wake()

    def _offer(self, sink: Sink, delta: StreamDelta) -> bool:
        try:
            return sink(delta)
        except Exception:  # the reader will meet it again; the step of all the others goes on
            logger.exception("writing a delta of %s failed", self.request_id)
            self.sink = None
            return False

    def end(self, error: QuireError | None = None) -> None:
        """Nothing more will come. Unread deltas can still be read, then the error is raised."""
        self.error = error
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
        self.wake()

    def wake(self) -> None:
        """Let the reader look again."""
        if self.idle and self.waiter is not None:
            self.idle = False
            if not self.waiter.done():  # it may have been cancelled in this moment
                self.waiter.set_result(None)


class LiveStream:
    """api.Stream. One reader; dropped without being read to the end, it cancels itself."""

    __slots__ = ("__weakref__", "_cancel", "_live", "_loop", "output", "request_id")

    def __init__(self, live: Live, loop: asyncio.AbstractEventLoop, cancel: Callable[[Live], None]) -> None:
        self._live, self._loop, self._cancel = live, loop, cancel
        self.request_id = live.request_id
        self.output = live.output

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        live = self._live
        while not live.pending:
            if live.error is not None:
                raise live.error
            if live.output.finished:
                raise StopAsyncIteration
            if live.waiter is not None:
                raise RuntimeError("a stream has one reader")
            live.waiter = self._loop.create_future()
            live.idle = True
            try:
                await live.waiter
            finally:
                live.waiter, live.idle = None, False
        delta = live.pending.pop(next(iter(live.pending)))
        live.unread -= len(delta.token_ids)
        if live.pending:
            live.unread_since = time.monotonic()
        return delta

    def deliver_to(self, sink: Sink) -> None:
        """Offer deltas to `sink` as they come, before they become unread."""
        self._live.sink = sink

    async def aclose(self) -> None:
        """As `cancel`."""
        self.cancel()

    def cancel(self) -> None:
        """Stop computing within one step and forget the request. Harmless when it has ended."""
        self._cancel(self._live)

    def __del__(self) -> None:
        if not self._live.output.finished and not self._loop.is_closed():
            # a garbage collection may run on any thread
            self._loop.call_soon_threadsafe(self._cancel, self._live)


def _merge(into: StreamDelta, delta: StreamDelta) -> None:
    into.text += delta.text
    into.token_ids += delta.token_ids
    if delta.logprobs is not None:
        into.logprobs = (into.logprobs or []) + delta.logprobs
    into.finish_reason = delta.finish_reason
    into.stop_reason = delta.stop_reason
