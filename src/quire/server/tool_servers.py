"""The tool servers (MCP) that an operator named: sessions with them, for each API key its own, and calls in threads.

No request can name another server. What hangs, dies or sends too much fails one request to it: each has a limit of
time and of bytes, and those of one key to one server take at most half of the places (docs/decisions/0102).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from quire import __version__
from quire.mcp.connect import connect
from quire.mcp.session import TIMED_OUT, CallResult, Cancellation, McpError, McpSession, OfferedTool
from quire.mcp.settings import McpSettings, ServerSettings
from quire.server.logs import log
from quire.server.metrics import ToolServerCounts

T = TypeVar("T")
_Key = tuple[str, str]  # tenant, server
_Work = Callable[[McpSession, Cancellation], T]

MAX_SESSIONS = 64
_FORGOTTEN = 404  # the status of a server that does not know the session any more: it has run nothing


class _Live:
    """A session that is open, and how many threads use it. No call begins with one that is `retired`."""

    def __init__(self, session: McpSession) -> None:
        self.session = session
        self.users = 0
        self.retired = self.closed = False


class _Seat:
    """The session of an API key with a server. Threads open it one after the other."""

    def __init__(self) -> None:
        self.live: _Live | None = None
        self.users = 0
        self.opening = threading.Lock()


class ToolServers:
    """Runs tools for responses. `find` says which server a request means."""

    def __init__(self, settings: McpSettings) -> None:
        self.settings = settings
        self._seats: dict[_Key, _Seat] = {}  # the last used last
        self._running: Counter[_Key] = Counter()
        self._freed = asyncio.Condition()
        self._waking: set[asyncio.Task[None]] = set()
        self._counting = threading.Lock()
        self._threads = ThreadPoolExecutor(settings.calls, "quire-tools")
        self._told: set[str] = set()

    @property
    def names(self) -> Sequence[str]:
        """The servers of the operator."""
        return [server.name for server in self.settings.servers]

    def find(self, label: str, url: str | None) -> ServerSettings | None:
        """The server that a request means: one with this URL, or without a URL the one of this name."""
        named = [server for server in self.settings.servers if server.name == label]
        if url is None:
            return named[0] if named else None
        return next((server for server in (*named, *self.settings.servers) if server.url == url), None)

    async def tools(self, tenant: str, server: ServerSettings, counts: ToolServerCounts) -> list[OfferedTool]:
        """The tools of a server that the operator allows. Raises McpError."""
        offered = await self._run(tenant, server, counts, "list", lambda session, stop: session.tools(stop))
        missing = sorted(server.tools - {tool.name for tool in offered} - {"*"})
        if missing:
            self.tell(f"MCP server {server.name!r} has no tool {', '.join(missing)}")
        if not server.tools:
            self.tell(
                f'MCP server {server.name!r} has no "tools" in the file: none of its tools may be called'
            )
        return [tool for tool in offered if server.allows(tool.name)]

    async def call(
        self, tenant: str, server: ServerSettings, counts: ToolServerCounts, tool: str,
        arguments: Mapping[str, Any],
    ) -> CallResult:  # fmt: skip
        """Call a tool. Raises McpError."""
        if not server.allows(tool):
            raise McpError(f"MCP server {server.name!r}: {tool!r} is not among the tools that may be called")
        return await self._run(
            tenant, server, counts, "call", lambda session, stop: session.call(tool, arguments, stop)
        )

    def close(self) -> None:
        """End all sessions."""
        seats, self._seats = list(self._seats.values()), {}
        for seat in seats:
            if seat.live is not None:
                seat.live.session.close()
        self._threads.shutdown(wait=False)

    async def _run(
        self, tenant: str, server: ServerSettings, counts: ToolServerCounts, what: str, work: _Work[T]
    ) -> T:  # fmt: skip
        """Do `work` in a thread, within the time of the server. Cancelling this ends it."""
        start, outcome = time.monotonic(), "error"
        try:
            found = await self._try((tenant, server.name), server, work)
            outcome = "failed" if isinstance(found, CallResult) and found.failed else "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except McpError as error:
            self.tell(str(error))
            raise
        finally:
            counts.count(server.name, what, outcome, time.monotonic() - start)
        return found

    async def _try(self, key: _Key, server: ServerSettings, work: _Work[T]) -> T:
        end = asyncio.get_running_loop().time() + server.timeout
        try:
            try:
                return await self._in_place(key, server, work, end)
            except McpError as error:
                if error.status != _FORGOTTEN or not error.lost:
                    raise
            return await self._in_place(key, server, work, end)
        except TimeoutError:
            message = f"MCP server {server.name!r} did not answer within {server.timeout:g} s"
            raise McpError(message, code=TIMED_OUT) from None

    async def _in_place(self, key: _Key, server: ServerSettings, work: _Work[T], end: float) -> T:
        """Take a place, and a thread that keeps it until it ends, which is soon after a cancellation. Raises
        TimeoutError at `end`, a time of the loop.
        """
        async with asyncio.timeout_at(end), self._freed:
            await self._freed.wait_for(lambda: self._may_run(key))
            self._running[key] += 1
        seat, stop = self._seat(key), Cancellation()
        seat.users += 1
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._threads, partial(self._work, seat, server, stop, work))
        call.add_done_callback(partial(self._ended, key, seat))
        try:
            async with asyncio.timeout_at(end):
                return await asyncio.shield(call)
        except TimeoutError:
            if seat.live is not None:
                seat.live.retired = True  # before the next call begins
            stop.cancel()
            raise
        except asyncio.CancelledError:
            stop.cancel()
            raise

    def _work(self, seat: _Seat, server: ServerSettings, stop: Cancellation, work: _Work[T]) -> T:
        live = self._opened(seat, server, stop)
        try:
            return work(live.session, stop)
        except McpError as error:
            live.retired = live.retired or error.lost
            raise
        finally:
            self._leave(live)

    def _may_run(self, key: _Key) -> bool:
        """Whether there is a place. Who has some gets one only if as many stay free."""
        free, own = self.settings.calls - self._running.total(), self._running[key]
        return free > 0 and (not own or own < free)

    def _ended(self, key: _Key, seat: _Seat, call: asyncio.Future[Any]) -> None:
        seat.users -= 1
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        call.exception()  # nobody may wait for it any more
        waking = asyncio.create_task(self._wake())
        self._waking.add(waking)
        waking.add_done_callback(self._waking.discard)

    async def _wake(self) -> None:
        async with self._freed:
            self._freed.notify_all()

    # ---- sessions

    def _seat(self, key: _Key) -> _Seat:
        """The seat of a key, now the last used one. Raises McpError when there are too many in use."""
        seat = self._seats.pop(key, None)
        if seat is None:
            seat = _Seat()
            if len(self._seats) >= MAX_SESSIONS:
                self._leave_one()
        self._seats[key] = seat
        return seat

    def _leave_one(self) -> None:
        for key, seat in self._seats.items():
            if not seat.users:
                del self._seats[key]
                if seat.live is not None:
                    threading.Thread(target=seat.live.session.close, daemon=True).start()
                return

    def _opened(self, seat: _Seat, server: ServerSettings, stop: Cancellation) -> _Live:
        """The session of a seat, which one more thread uses now."""
        with seat.opening:
            if stop.cancelled:
                raise McpError(f"MCP server {server.name!r}: the request was cancelled")
            live = seat.live
            if live is None or live.retired or live.session.broken:
                if live is not None:
                    live.retired = True
                    self._close_unused(live)
                session = connect(server, self.settings.message_bytes)
                try:
                    session.open(__version__, stop)
                except BaseException:
                    session.close()
                    raise
                live = seat.live = _Live(session)
            with self._counting:
                live.users += 1
            return live

    def _leave(self, live: _Live) -> None:
        """One thread less uses a session. One that is retired ends with the last; the next call begins another one."""
        with self._counting:
            live.users -= 1
        if live.retired:
            self._close_unused(live)

    def _close_unused(self, live: _Live) -> None:
        with self._counting:
            closes = not live.users and not live.closed
            live.closed = live.closed or closes
        if closes:
            live.session.close()

    def tell(self, text: str) -> None:
        """Log what an operator should know, once."""
        if text not in self._told and len(self._told) < MAX_SESSIONS:
            self._told.add(text)
            log.warning("%s (told once; see the metric quire_tool_server_requests)", text)
