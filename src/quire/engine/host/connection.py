"""One life of an engine as the event loop sees it: start, load, exchange messages, end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import msgspec

from quire.engine.api import EngineUnavailableError
from quire.engine.host.hosts import Host
from quire.engine.host.messages import (
    Abort,
    Command,
    Fatal,
    FrameReader,
    Load,
    LoadProgress,
    ProtocolError,
    Ready,
    Report,
    Stop,
    frame,
    report_decoder,
)
from quire.types import CheckpointError, MemoryBudgetError, QuireError, UnsupportedModelError

logger = logging.getLogger("quire.engine")

# Errors of loading that keep their class here; any other becomes EngineUnavailableError.
_LOAD_ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (CheckpointError, UnsupportedModelError, MemoryBudgetError, ValueError, MemoryError, OSError)
}
_STOP_SECONDS = 2.0


class EngineConnection(asyncio.Protocol):
    """Socket and host of one engine. `on_report` gets every message once the engine is ready; `on_lost` is called
    once when the engine ends without being stopped.
    """

    def __init__(self, host: Host, on_report: Callable[[Report], None], on_lost: Callable[[], None]) -> None:
        self.host = host
        self._on_report, self._on_lost = on_report, on_lost
        self._reader = FrameReader()
        self._decode = report_decoder().decode
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._progress: Callable[[int, int], None] | None = None
        self._stopping = False
        self._frames: list[bytes | bytearray] = []  # to be sent at the end of this turn of the loop

    async def open(self, load: Load, progress: Callable[[int, int], None] | None) -> Ready:
        """Start the engine and wait until it has loaded. Raises the errors of loading, once the engine has ended."""
        loop = asyncio.get_running_loop()
        self._ready, self._progress = loop.create_future(), progress
        try:
            sock = await self.host.start()
            await loop.create_unix_connection(lambda: self, sock=sock)
            self.send(load)
            return await self._ready
        except EngineUnavailableError as error:
            raise EngineUnavailableError(f"{error}: {await self._end()}") from None
        except BaseException:
            await self._end()
            raise

    async def _end(self) -> str:
        self.abandon()
        return await self.host.ended()

    def send(self, command: Command) -> None:
        """Send a command; never blocks. The command is dropped when the engine has gone: `on_lost` reports that.

        What is sent in one turn of the event loop goes together at its end: an engine that waits wakes up once, and
        requests that begin together are in one step. An abort goes at once, with what was sent before it.
        """
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append(frame(command))
        if isinstance(command, Abort):
            self._flush()

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if frames and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(frames)

    async def close(self) -> None:
        """Stop the engine, and make sure that it ends."""
        self._stopping = True
        self.send(Stop())
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self.host.ended()
        except TimeoutError:
            self.host.kill()
            await self.host.ended()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Kill the engine and forget it, without calling `on_lost`."""
        self._stopping = True
        self.host.kill()
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._receive(self._decode(body))
        except (msgspec.MsgspecError, ProtocolError) as error:
            logger.error("invalid message from the engine: %s", error)
            self.host.kill()
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the base class names it
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineUnavailableError("the engine ended while it was loading"))
        elif not self._stopping:
            self._stopping = True
            self._on_lost()

    def _receive(self, report: Report) -> None:
        if self._ready is None or self._ready.done():
            self._on_report(report)
        elif isinstance(report, Ready):
            self._ready.set_result(report)
        elif isinstance(report, Fatal):
            self._ready.set_exception(_load_error(report))
        elif isinstance(report, LoadProgress) and self._progress is not None:
            self._progress(report.done, report.total)


def _load_error(report: Fatal) -> Exception:
    known = _LOAD_ERRORS.get(report.kind)
    return known(report.message) if known else QuireError(f"{report.kind}: {report.message}")
