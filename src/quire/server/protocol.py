"""uvicorn's HTTP protocol with limits on what a connection may cost before the application sees it."""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop, TimerHandle, Transport
from dataclasses import dataclass
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from quire.server.errors import ApiError

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_PIPELINED = 16
# What one read from a socket may bring beyond the headers it completes.
_READ_SLACK = 256 * 1024
# A connection without a request for so long makes room for a new one when there are too many.
_IDLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connections at once, and seconds for a request's headers."""

    connections: int
    header_seconds: float


class LimitedProtocol(HttpToolsProtocol):
    """Bounds connections, header size and count, time for headers, and pipelining; refusals are JSON errors.

    Adds scope["quire.abort"], which drops the connection with what is still to be sent.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._timer: TimerHandle | None = None
        self._in_headers = False
        self._header_bytes = 0
        self._refusal: ApiError | None = None
        self._pending: ApiError | None = None  # why the parser was stopped
        self._active: Any = None  # the cycle that is being answered; self.cycle may be a pipelined one
        self._idle_since = time.monotonic()

    # ---- connection

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        full = len(self.connections) >= self._limits.connections and not self._make_room()
        super().connection_made(transport)
        if full:
            self._refuse(ApiError(
                429, f"there are {self._limits.connections} connections, as many as are allowed",
                code="too_many_connections", headers=[(b"retry-after", b"1")],
            ))  # fmt: skip
            return
        self._start_timer()

    def _make_room(self) -> bool:
        """Close a connection that does nothing."""
        now = time.monotonic()
        for other in self.connections:
            if isinstance(other, LimitedProtocol) and other.idle_for(now) > _IDLE_SECONDS:
                other.transport.close()
                return True
        return False

    def idle_for(self, now: float) -> float:
        """Seconds since this connection last had a request in work; 0 while it has one."""
        busy = self.cycle is not None and not self.cycle.response_complete
        return 0.0 if busy else now - self._idle_since

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        active = self._active
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()

    # ---- headers

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._timer is None and self.idle_for(time.monotonic()):
            self._start_timer()
        super().data_received(data)
        if self._in_headers and self._refusal is None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES + _READ_SLACK:
                self._refuse(_headers_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0
        self.scope["quire.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)
        if len(self.headers) > MAX_HEADERS:
            self._fail(_headers_too_large())

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            self._fail(_headers_too_large())

    def _fail(self, error: ApiError) -> None:
        """Stop the parser; its failure is answered in send_400_response."""
        self._pending = error
        raise error

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_timer()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(ApiError(400, f"more than {MAX_PIPELINED} requests are pipelined", code="pipelining"))
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._idle_since = time.monotonic()
        super().on_response_complete()

    # ---- refusals

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._limits.header_seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if not self._in_headers:  # nothing was asked
            self.transport.close()
            return
        message = f"the headers were not complete after {self._limits.header_seconds:g} s"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        self._refuse(self._pending or ApiError(400, "not a valid HTTP request", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application and close. Nothing is sent into the middle of another response."""
        self._refusal = error
        self._stop_timer()
        active = self._active
        # a request whose own body is malformed is answered here, if the application has not begun to
        unanswered = active is self.cycle and not active.response_started if active is not None else True
        if unanswered or active.response_complete:
            body = error.body()
            headers = [
                (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"), *error.headers,
            ]  # fmt: skip
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        self.transport.close()


def _headers_too_large() -> ApiError:
    limit = f"{MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes"
    return ApiError(431, f"the request's headers are over the limit of {limit}", code="headers_too_large")
