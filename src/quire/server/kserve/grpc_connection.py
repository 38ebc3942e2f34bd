"""HTTP/2 connections that carry gRPC. Needs the package `h2`.

Frames and their rules are h2's. What is added: gRPC's calls (grpc_call), limits on what a connection may cost, and a
way for a message to go to the socket without h2, whose objects for a frame cost more than the rest of a token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error
from h2.settings import SettingCodes

from quire.server.connections import Connections
from quire.server.kserve.grpc_call import GrpcCall, GrpcLimits, GrpcStatus
from quire.server.logs import log
from quire.server.queued_writes import QueuedWrites

WINDOW_BYTES = 16 * 1024  # of a message that nobody reads yet
_MAX_HEADER_BYTES = 16 * 1024
# Pings, settings, resets and priorities that a connection may send in so many seconds. Each costs an answer, or the
# start of a call (CVE-2023-44487), and nothing else limits them.
_MAX_CONTROL, _CONTROL_SECONDS = 1000, 10.0
_CONTROL = (events.PingReceived, events.RemoteSettingsChanged, events.StreamReset, events.PriorityUpdated)
# Answers a call: how it ended, and why.
AnswerCall = Callable[[GrpcCall], Awaitable[tuple[GrpcStatus, str]]]


class _Frames(H2Connection):  # type: ignore[misc]
    """Remembers how the last streams ended, for frames that were on their way: 100 bytes each."""

    MAX_CLOSED_STREAMS = 1024


class GrpcConnection(QueuedWrites, asyncio.Protocol):
    """One connection, in `open_` from its first moment to its end."""

    def __init__(
        self, line: Connections, limits: GrpcLimits, answer: AnswerCall, open_: dict[GrpcConnection, None]
    ) -> None:
        QueuedWrites.__init__(self, line)
        self.loop = asyncio.get_running_loop()
        self.limits = limits
        self.h2 = _Frames(H2Configuration(client_side=False))
        self.calls: dict[int, GrpcCall] = {}  # by stream
        self._answer, self._open = answer, open_
        self._moved = asyncio.Event()  # set, and replaced, when there may be room for output
        self._timer: asyncio.TimerHandle | None = None
        self._control, self._since = 0, 0.0
        self._closing = False
        open_[self] = None

    @property
    def idle(self) -> bool:
        """Whether there has been a connection, and there is no call."""
        return self._timer is not None

    # ---- connection

    def connection_made(self, transport: Any) -> None:
        """Say what this side allows, and wait for the client to begin."""
        transport.set_write_buffer_limits(high=1, low=0)  # see LimitedProtocol
        self._wire = transport
        if transport.get_extra_info("sslcontext") is None:
            self._file = transport.get_extra_info("socket").fileno()
        self.h2.initiate_connection()
        self.h2.update_settings({
            SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
            SettingCodes.MAX_CONCURRENT_STREAMS: self.limits.calls,
            SettingCodes.MAX_HEADER_LIST_SIZE: _MAX_HEADER_BYTES,
        })  # fmt: skip
        self.h2.decoder.max_header_list_size = _MAX_HEADER_BYTES
        # calls that are not read must not hold up the others
        self.h2.increment_flow_control_window(self.limits.calls * WINDOW_BYTES - 65535)
        self.flush()
        self._end_after(self.limits.header_timeout)

    def connection_lost(self, _: Exception | None) -> None:
        """End all calls."""
        self._open.pop(self, None)
        self._closing = True
        self._stop_timer()
        for call in list(self.calls.values()):
            call.leave()
        self._wake()

    def stop(self) -> list[asyncio.Task[None]]:
        """End all calls. Returns what is still to be waited for before the end of the connection."""
        for call in self.calls.values():
            call.cancel(GrpcStatus.UNAVAILABLE, "the server is shutting down")
        return [call.task for call in self.calls.values() if call.task is not None]

    def end(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Close, and discard what the client does not read."""
        if self._closing:
            return
        self._closing = True
        self._open.pop(self, None)
        self._stop_timer()
        with contextlib.suppress(H2Error):  # it has ended by an error of the client
            self.h2.close_connection(code)
        self.flush()
        self.send_chunks()
        if self._wire.get_write_buffer_size():
            self._wire.abort()
        else:
            self._wire.close()

    def _end_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- reading

    def data_received(self, data: bytes) -> None:
        """Obey the frames that have come."""
        if self._closing:
            return
        try:
            for event in self.h2.receive_data(data):
                self._take(event)
        except H2Error:
            self.end(ErrorCodes.PROTOCOL_ERROR)
        self.flush()

    def _take(self, event: events.Event) -> None:
        if isinstance(event, _CONTROL):
            self._count()
        match event:
            case events.RequestReceived():
                self._begin(event.stream_id, event.headers)
            case events.DataReceived() | events.StreamEnded() | events.StreamReset():
                self._pass(event)
            case events.WindowUpdated():
                self._wake()
            case events.RemoteSettingsChanged():
                if not self.calls:
                    self._end_after(self.limits.idle_timeout)
                self._wake()
            case events.ConnectionTerminated():  # h2 sends nothing behind it
                self.end()

    def _pass(self, event: events.DataReceived | events.StreamEnded | events.StreamReset) -> None:
        """Tell the call of an event, if it has not ended."""
        call = self.calls.get(event.stream_id)
        if isinstance(event, events.DataReceived):
            if call is None:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            else:
                call.feed(event.data, event.flow_controlled_length)
        elif call is not None:
            call.feed_end() if isinstance(event, events.StreamEnded) else call.leave()

    def _count(self) -> None:
        """Count a frame that a client could send without end."""
        now = self.loop.time()
        if now - self._since > _CONTROL_SECONDS:
            self._since, self._control = now, 0
        self._control += 1
        if self._control > _MAX_CONTROL:
            self.end(ErrorCodes.ENHANCE_YOUR_CALM)

    # ---- calls

    def _begin(self, stream: int, headers: Any) -> None:
        if stream not in self.h2.streams:  # it has been reset meanwhile
            return
        self._stop_timer()
        call = self.calls[stream] = GrpcCall(self, stream, headers)
        call.task = self.loop.create_task(self._run(call))
        call.task.add_done_callback(lambda _: call.finish())

    async def _run(self, call: GrpcCall) -> None:
        """Have a call answered."""
        try:
            call.ending = call.refusal or await self._answer(call)
        except Exception:
            log.exception("a call over gRPC failed")
            call.ending = GrpcStatus.INTERNAL, "internal error"

    def forget(self, call: GrpcCall) -> None:
        """A call has ended."""
        self.calls.pop(call.stream, None)
        if not self.calls and not self._closing:
            self._end_after(self.limits.idle_timeout)

    # ---- writing

    def flush(self) -> None:
        """Send what h2 has to say, behind what is queued."""
        if data := self.h2.data_to_send():
            self.send_later(data)

    def pause_writing(self) -> None:
        """The transport is full: what the client sends meanwhile could need answers."""
        self.paused = True
        with contextlib.suppress(RuntimeError):  # closing
            self._wire.pause_reading()

    def resume_writing(self) -> None:
        """The client reads."""
        self.paused = False
        with contextlib.suppress(RuntimeError):
            self._wire.resume_reading()
        self._wake()

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def moved(self) -> None:
        """Wait until there may be room for output."""
        await self._moved.wait()
