"""uvicorn's HTTP protocol with limits on what a connection may cost before the application sees it."""

from __future__ import annotations

import os
from asyncio import AbstractEventLoop, TimerHandle, Transport
from dataclasses import dataclass, field
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from quire.server.errors import ApiError
from quire.server.exchange import GRACE_SECONDS

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_PIPELINED = 16
# After a refusal: how long and how much is still read and thrown away. Closing with input unread would reset the
# connection, and take the answer from a client that is still sending.
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 4 * 2**20
# What one read from a socket may bring beyond the headers it completes.
_READ_SLACK = 256 * 1024


@dataclass(slots=True)
class Connections:
    """Limits of one server's connections, and those that have no request in work, longest idle first.

    When there are `limit` and another comes, the longest idle one is closed: whoever holds connections without
    using them cannot keep others out. Only when all are in use is a new one refused.
    """

    limit: int
    header_seconds: float
    idle: dict[LimitedProtocol, None] = field(default_factory=dict)
    unsent: list[LimitedProtocol] = field(default_factory=list)

    def send_soon(self, connection: LimitedProtocol) -> None:
        """Send a connection's chunks when the current callback is over, after those of the others before it.

        A step of the engine brings a token to every stream. Making all events first and then sending all of them
        costs a third to a half less than taking turns: neither half empties the caches of the other, and a reader on
        this machine that is awake does not have to be woken for each event.
        """
        if not self.unsent:
            connection.loop.call_soon(self._send)
        self.unsent.append(connection)

    def _send(self) -> None:
        connections, self.unsent = self.unsent, []
        for connection in connections:
            connection.send_chunks()

    def make_room(self) -> bool:
        """Close the connection that has been idle for longest; false when there is none."""
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        del self.idle[oldest]
        oldest.transport.close()
        return True


class LimitedProtocol(HttpToolsProtocol):
    """Bounds connections, header size and count, time for headers, and pipelining; refusals are JSON errors.

    Adds scope["quire.abort"], which drops the connection with what is still to be sent;
    scope["quire.blocked"], whether sending has to wait for the client, or would reach nobody; and
    scope["quire.writer"], whose write_chunk sends a chunk of a response that has started when the current callback
    is over. What a task sends that is woken after such a chunk was given comes after it.
    """

    # What every token touches lies together: caches are cold when a step's tokens come.
    __slots__ = ("_chunks", "_file", "_line", "_paused", "_wire")

    def __init__(
        self,
        table: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table = table
        self._timer: TimerHandle | None = None
        self._in_headers = False
        self._header_bytes = 0  # of the headers in work, as far as they are parsed
        self._read_bytes = 0  # since the headers began, or since a refusal
        self._refusal: ApiError | None = None
        self._pending: ApiError | None = None  # why the parser was stopped
        self._active: Any = None  # the cycle that is being answered; self.cycle may be a pipelined one
        self._chunks = b""  # to be sent when the current callback is over
        self._line = table
        self._paused = False  # as self.flow.write_paused
        self._file = -1  # the socket, where its bytes are ours to write

    # ---- connection

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        full = len(self.connections) >= self._table.limit and not self._table.make_room()
        super().connection_made(transport)
        self._wire = transport
        sock = transport.get_extra_info("socket")
        if sock is not None and transport.get_extra_info("sslcontext") is None:
            self._file = sock.fileno()
        if full:
            self._refuse(ApiError(
                429, f"there are {self._table.limit} connections with requests, as many as are allowed",
                code="too_many_connections", headers=[(b"retry-after", b"1")],
            ))  # fmt: skip
            return
        self._table.idle[self] = None
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._table.idle.pop(self, None)
        super().connection_lost(exc)
        active = self._active
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()

    # ---- headers

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            self._read_bytes += len(data)
            if self._read_bytes > _LINGER_BYTES:
                self.transport.close()
            return
        if self._timer is None and self in self._table.idle:
            self._start_timer()
        self._parse(data)
        if self._in_headers and self._refusal is None:
            self._read_bytes += len(data)  # a header is parsed at its end: till then only this grows
            if self._read_bytes > MAX_HEADER_BYTES + _READ_SLACK:
                self._refuse(_headers_too_large())

    def _parse(self, data: bytes) -> None:
        """Feed the parser. Where headers ask for another protocol it stops and takes the body for that protocol's;
        the wish may be ignored (RFC 9110, section 7.8), so they are parsed again without it. Java's client makes it
        with every first request.
        """
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as stopped:
                    rest = rest[stopped.args[0] :]
                    head = self._head_without_upgrade()
                    self.parser = httptools.HttpRequestParser(self)  # that one has seen the connection's end
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                    self.parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # CONNECT is one
            self.send_400_response("")

    def _head_without_upgrade(self) -> bytes:
        lines = [
            b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                kept = [option for option in options if option.lower() not in {b"upgrade", b"http2-settings"}]
                lines.append(b"connection: " + b", ".join(kept))
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes, self._read_bytes = True, 0, 0
        self.scope["quire.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope["quire.blocked"] = self._blocked  # type: ignore[typeddict-unknown-key]
        self.scope["quire.writer"] = self  # type: ignore[typeddict-unknown-key]

    def _blocked(self) -> bool:
        return self._paused or self.transport.is_closing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self._paused = False

    def write_chunk(self, before: bytes, text: bytes, after: bytes) -> int:
        """Send the three pieces as one chunk (RFC 9112, section 7.1) soon; their size, 0 while the client does not
        read.
        """
        if self._paused:
            return 0
        size = len(before) + len(text) + len(after)
        chunk = b"%x\r\n%b%b%b\r\n" % (size, before, text, after)
        if self._chunks:
            self._chunks += chunk
        else:
            self._chunks = chunk
            self._line.send_soon(self)
        return size

    def send_chunks(self) -> None:
        """Send what was given to `write_chunk`; forget it when the client has gone.

        While nothing is buffered the socket is written to here: the transport's way to the same call costs a tenth of
        a token. What the socket does not take, and every failure, is the transport's.
        """
        chunks, self._chunks = self._chunks, b""
        transport = self._wire
        if transport.is_closing():
            return
        if self._file >= 0 and not transport.get_write_buffer_size():
            try:
                written = os.write(self._file, chunks)
            except OSError:
                written = 0
            if written == len(chunks):
                return
            chunks = chunks[written:]
        transport.write(chunks)

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
        if self.parser.should_upgrade():
            return
        self._in_headers = False
        self._stop_timer()
        self._table.idle.pop(self, None)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(ApiError(400, f"more than {MAX_PIPELINED} requests are pipelined", code="pipelining"))
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._active.response_complete and not self.transport.is_closing():
            if self._refusal is None:
                self._table.idle[self] = None
            else:
                self._answer_refusal(self._refusal)

    # ---- refusals

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._table.header_seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = self.loop.call_later(GRACE_SECONDS, self._end_late)

    def _end_late(self) -> None:
        self._timer = None
        if not self._in_headers:  # nothing was asked
            self.transport.close()
            return
        message = f"the headers were not complete after {self._table.header_seconds:g} s"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        self._refuse(self._pending or ApiError(400, "not a valid HTTP request", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application and close, after the answers to what came before, wherever reads ended.

        A request whose own body is malformed is answered here, if the application has not begun to.
        """
        self._refusal = error
        self._read_bytes = 0
        self._stop_timer()
        active = self._active
        if active is None or active.response_complete:
            self._answer_refusal(error)
        elif active is self.cycle and active.more_body:
            if active.response_started:
                self.transport.close()
            else:
                self._answer_refusal(error)
        elif len(self.pipeline) >= MAX_PIPELINED:
            self.transport.close()
        elif self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()  # the malformed one

    def _answer_refusal(self, error: ApiError) -> None:
        body = error.body()
        headers = [
            (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"), *error.headers,
        ]  # fmt: skip
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._table.idle[self] = None  # the first to go when there are too many
            self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()


def _headers_too_large() -> ApiError:
    limit = f"{MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes"
    return ApiError(431, f"the request's headers are over the limit of {limit}", code="headers_too_large")
