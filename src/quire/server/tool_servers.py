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

MAX_SESSIONS = 64
_FORGOTTEN = 404  # the status of a server that does not know the session any more: it has run nothing


class _Seat:
    """The session of an API key with a server. Threads open it one after the other."""

    def __init__(self) -> None:
        self.session: McpSession | None = None
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
            if seat.session is not None:
                seat.session.close()
        self._threads.shutdown(wait=False)

    async def _run(
        self, tenant: str, server: ServerSettings, counts: ToolServerCounts, what: str,
        work: Callable[[McpSession, Cancellation], T],
    ) -> T:  # fmt: skip
        """Do `work` in a thread, within the time of the server. Cancelling this ends it."""
        start, outcome = time.monotonic(), "error"
        try:
            async with asyncio.timeout(server.timeout):
                found = await self._try(tenant, server, work)
            outcome = "failed" if isinstance(found, CallResult) and found.failed else "done"
        except TimeoutError:
            raise McpError(
                f"MCP server {server.name!r} did not answer within {server.timeout:g} s", code=TIMED_OUT
            ) from None
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except McpError as error:
            self.tell(str(error))
            raise
        finally:
            counts.count(server.name, what, outcome, time.monotonic() - start)
        return found

    async def _try(
        self, tenant: str, server: ServerSettings, work: Callable[[McpSession, Cancellation], T]
    ) -> T:
        key = tenant, server.name
        try:
            return await self._in_place(key, server, work)
        except McpError as error:
            if error.status != _FORGOTTEN or not error.lost:
                raise
        return await self._in_place(key, server, work)

    async def _in_place(
        self, key: _Key, server: ServerSettings, work: Callable[[McpSession, Cancellation], T]
    ) -> T:
        """Take a place, and a thread that keeps it until it ends, which is soon after a cancellation."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._may_run(key))
            self._running[key] += 1
        seat, stop = self._seat(key), Cancellation()
        seat.users += 1
        call = asyncio.get_running_loop().run_in_executor(
            self._threads, partial(self._work, seat, server, stop, work)
        )
        call.add_done_callback(partial(self._ended, key, seat))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            stop.cancel()
            raise

    def _work(
        self,
        seat: _Seat,
        server: ServerSettings,
        stop: Cancellation,
        work: Callable[[McpSession, Cancellation], T],
    ) -> T:
        session = self._opened(seat, server, stop)
        try:
            return work(session, stop)
        except McpError as error:
            if error.lost:
                self._retire(seat, session)
            raise

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
                if seat.session is not None:
                    threading.Thread(target=seat.session.close, daemon=True).start()
                return

    def _opened(self, seat: _Seat, server: ServerSettings, stop: Cancellation) -> McpSession:
        with seat.opening:
            session = seat.session
            if session is not None and session.broken:
                seat.session = None
                session.close()
                session = None
            if session is None:
                session = connect(server, self.settings.message_bytes)
                try:
                    session.open(__version__, stop)
                except BaseException:
                    session.close()
                    raise
                seat.session = session
            return session

    @staticmethod
    def _retire(seat: _Seat, session: McpSession) -> None:
        """End a session that is of no use any more; the next call begins another one."""
        with seat.opening:
            if seat.session is not session:
                return
            seat.session = None
        session.close()

    def tell(self, text: str) -> None:
        """Log what an operator should know, once."""
        if text not in self._told and len(self._told) < MAX_SESSIONS:
            self._told.add(text)
            log.warning("%s (told once; see the metric quire_tool_server_requests)", text)
