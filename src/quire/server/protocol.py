"""uvicorn's HTTP protocol with limits on what a connection may cost before the application sees a request."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from asyncio import AbstractEventLoop, Protocol, Task, TimerHandle, Transport
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from quire.server.connections import Connections
from quire.server.errors import OPENAI_ERRORS, ApiError
from quire.server.exchange import GRACE_SECONDS, ChunkPiece
from quire.server.logs import log_refusal
from quire.server.queued_writes import QueuedWrites
from quire.server.request_memory import HEADER, Held, RequestMemory
from quire.util.sizes import format_size

# Limit of headers and trailers together.
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_PIPELINED = 16
_VERSIONS = ("1.1", "1.0")
# The parser gets this much at a time and may keep as much: headers, and what surrounds bodies and chunks.
_PIECE = 16 * 1024
MAX_BESIDE_BYTES = MAX_HEADER_BYTES + 2 * _PIECE
# A body may be long and its chunks short, so each of its bytes allows more framing, up to this much at any time.
_CREDIT = 2 * _PIECE
# Time for the peer to close its side of a TLS connection, and for a close that waits for data being read.
CLOSE_SECONDS = 5.0
# A slow reader makes progress when it reads this much of a complete answer.
_PROGRESS_BYTES = 32 * 1024
# After a refusal the rest of the request is read and discarded: for how long, how many bytes, and how long the peer may
# be silent. Closing with unread input would reset the connection, and a client still sending would lose the answer.
_LINGER_SECONDS = 30.0
_LINGER_BYTES = 64 * 2**20
_LINGER_SILENCE = 2.0
# TLS buffers grow with the largest single read or write and never shrink: measured at 1.3 to 1.5 of it.
_SMALL_PIECE = 16 * 1024
_GROWTH = 1.5


class LimitedProtocol(QueuedWrites, HttpToolsProtocol):
    """Limits connections, the time for a TLS handshake and headers, everything sent besides bodies, and pipelining.

    An error that comes before the application knows of a request is answered here, with a JSON error. An error within a
    body reaches the reader of the body as scope["quire.refused"], an ApiError.

    Adds scope["quire.begun"], when the first byte was read;
    scope["quire.abort"], which drops the connection and discards unsent output;
    scope["quire.blocked"], whether sending has to wait for the client or the client is gone;
    scope["quire.arrived"], whether there is something to receive; and
    scope["quire.writer"], whose write_chunk sends a chunk of a started response at the end of the current callback.
    Data sent after such a chunk was queued follows that chunk.
    """

    for_admin = False  # it came in at the address for administrators
    buffered = 0  # bytes that count towards the limit of all connection buffers

    def __init__(
        self,
        table: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: AbstractEventLoop | None = None,
    ) -> None:
        QueuedWrites.__init__(self, table)
        HttpToolsProtocol.__init__(self, config, server_state, app_state, _loop)
        self._table = table
        self._timer: TimerHandle | None = None
        self._socket: socket.socket | None = None  # until there is a transport
        self._opening: Task[None] | None = None
        self._in_headers = self._in_body = False
        self._header_bytes = self._headers_seen = (
            0  # of the current message, trailers included, parsed so far
        )
        self._beside = 0  # bytes of the current message besides its body, less the credit for the body
        self._read_bytes = 0  # read and discarded
        self._arrived = 0  # of a body, since memory was last taken for it
        self._grown = 0  # buffers kept by TLS
        self._unread = 0  # buffered bytes of complete answers
        self._unread_seconds = 0.0
        self._deaf = False  # everything that arrives is discarded
        self._ending = False  # the last answer has been given
        self._refusal: ApiError | None = None
        self._pending: ApiError | None = None  # why the parser was stopped
        self._active: Any = None  # the cycle being answered; self.cycle may be a pipelined one
        self.heir: Protocol | None = None  # what continues the connection as another protocol
        self.tls = False

    # ---- connection

    def accept(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Take over a connection: it counts from now on, and its time limits for handshake and headers start."""
        self.admit()
        self._socket = sock
        self._opening = self.loop.create_task(self._open(sock, tls))

    def admit(self) -> None:
        """Count this connection."""
        self._table.admit(self, len(self.connections))
        self.connections.add(self)
        self._start_timer()

    async def _open(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        options: dict[str, Any] = {}
        if tls is not None:
            seconds = self._table.header_seconds + 2 * GRACE_SECONDS  # slightly longer than our own limit
            options = {"ssl": tls, "ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": CLOSE_SECONDS}
        with contextlib.suppress(OSError, RuntimeError):  # no handshake, or the peer has left
            await self.loop.connect_accepted_socket(lambda: self, sock, **options)
        if self._socket is not None:
            self._forget()
            self.connections.discard(self)

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = None
        # What the kernel does not accept stays in the memory of the request: one piece. With a limit of 0 a TLS
        # transport would pause even when its buffer is empty.
        transport.set_write_buffer_limits(high=1, low=0)
        self._wire = transport
        sock = transport.get_extra_info("socket")
        self.tls = transport.get_extra_info("sslcontext") is not None
        if sock is not None and not self.tls:
            self._file = sock.fileno()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)
        for cycle, _ in self.pipeline:  # pipelined requests that were never started
            cycle.scope["quire.held"].close()  # type: ignore[typeddict-item]
        active = self._active
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()

    def _forget(self) -> None:
        self._stop_timer()
        self._table.forget(self)

    def drop(self) -> None:
        """Close at once and discard whatever is unsent or unread."""
        if self._socket is None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def shutdown(self) -> None:
        """Close after the current answer, because the server is shutting down."""
        if self._socket is None:
            super().shutdown()
        else:
            self.drop()

    def waiting(self, passed: float) -> float:
        """Seconds that complete answers have been left unread, as of this call, `passed` seconds after the previous
        one. A stream has its own watch until it waits for its reader.
        """
        active = self._active
        ended = active is None or active.response_complete or self.paused
        size = self.transport.get_write_buffer_size() if ended and self._socket is None else 0
        if size and self._unread - _PROGRESS_BYTES < size <= self._unread:
            self._unread_seconds += passed
        else:
            self._unread, self._unread_seconds = size, 0.0
        return self._unread_seconds

    def end_slow_reader(self) -> None:
        """Drop the connection and discard its buffered output."""
        self.drop()

    # ---- headers

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self in self._table.idle:
            self._start_timer()
        self._unset_keepalive_if_required()
        self._grow(len(data))
        whole = memoryview(data)
        for at in range(0, len(data), _PIECE):
            piece = whole[at : at + _PIECE]
            if self._deaf:
                self._read_bytes += len(piece)
                continue
            self._parse(piece)
            if self.heir is not None:
                self.heir.data_received(bytes(whole[at + _PIECE :]))
                return
            self._beside += len(piece)
            error = _headers_too_large() if self._beside > MAX_BESIDE_BYTES else self._take_body()
            if error is None and not self._has_buffer():
                error = _no_buffer(self._table)
            if error is not None and not self._deaf:
                self._refuse(error)
        if self._read_bytes > _LINGER_BYTES:
            self.transport.close()

    def _parse(self, rest: memoryview) -> None:
        """Feed the parser. Where headers ask to upgrade the protocol it stops and takes the body for data of that
        protocol. Such a request may be ignored (RFC 9110, section 7.8), so the headers are parsed again without it.
        Java's client sends it with every first request.
        """
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as stopped:
                    rest = rest[stopped.args[0] :]
                    if self._table.upgrade is not None and self._table.upgrade(self, bytes(rest)):
                        return
                    head = self._head_without_upgrade()
                    self.parser = httptools.HttpRequestParser(self)  # the old one is at its end
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                    self.parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # also raised for CONNECT
            self.send_400_response("")

    def hand_over(self) -> bytes | None:
        """Leave the connection to another protocol, which gets the head of the request that has just been read; None
        while there are others, or if there is no room.
        """
        answered = self._active is None or self._active.response_complete
        if not answered or self.pipeline or not self._table.has_room(self, len(self.connections)):
            return None
        self._stop_timer()
        self._table.forget(self)
        self.connections.discard(self)
        return self._head(self.headers)

    def _has_buffer(self) -> bool:
        """Count what is buffered; see Connections.has_buffer."""
        kept = 0
        if self._in_headers:
            kept = self._beside + HEADER * self._headers_seen
        elif self._in_body:  # its headers count towards the request
            kept = max(0, self._beside - self._header_bytes)
        return self._table.has_buffer(self, self._grown + kept)

    def _grow(self, size: int) -> None:
        """Note a read or write of `size` bytes at once."""
        if self.tls and size > _SMALL_PIECE:
            self._grown = max(self._grown, int(_GROWTH * size))

    def write(self, data: bytes) -> None:
        """Send a part of an answer."""
        self._grow(len(data))
        self.transport.write(data)

    def refuse_buffer(self) -> None:
        """Discard what is buffered to make room for others."""
        if self._in_headers:
            self._refuse(_no_buffer(self._table))
        else:
            self.drop()
            self._table.has_buffer(self, 0)

    def _head_without_upgrade(self) -> bytes:
        headers = []
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                kept = [option for option in options if option.lower() not in {b"upgrade", b"http2-settings"}]
                headers.append((name, b", ".join(kept)))
            elif name != b"upgrade":
                headers.append((name, value))
        return self._head(headers)

    def _head(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        version = self.parser.get_http_version().encode()
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)
        return b"\r\n".join([first, *(name + b": " + value for name, value in headers), b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes, self._headers_seen, self._beside = True, 0, 0, 0
        self.scope["quire.begun"] = time.monotonic()  # type: ignore[typeddict-unknown-key]
        self.scope["quire.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope["quire.admin"] = self.for_admin  # type: ignore[typeddict-unknown-key]
        self.scope["quire.blocked"] = self._blocked  # type: ignore[typeddict-unknown-key]
        self.scope["quire.writer"] = self  # type: ignore[typeddict-unknown-key]

    def _blocked(self) -> bool:
        return self.paused or self.transport.is_closing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.paused = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self.paused = False
        self._unread = 0  # the reader makes progress

    def write_chunk(self, before: ChunkPiece, text: ChunkPiece, after: ChunkPiece) -> int:
        """Queue the three pieces as one chunk (RFC 9112, section 7.1); returns their size, or 0 while the client does
        not read.
        """
        if self.paused:
            return 0
        size = len(before) + len(text) + len(after)
        self.send_later(b"%x\r\n%b%b%b\r\n" % (size, before, text, after))  # type: ignore[str-format]
        return size

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers_seen += 1
        self._count(len(name) + len(value) + 4)
        if self._headers_seen > MAX_HEADERS:
            self._fail(_headers_too_large())
        if self._in_headers:  # else a trailer: not needed, and must not be taken for a header
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            self._fail(_headers_too_large())

    def _fail(self, error: ApiError) -> None:
        """Stop the parser; send_400_response answers the failure."""
        self._pending = error
        raise error

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_headers = False
        self._stop_timer()
        self._table.idle.pop(self, None)
        if self.parser.get_http_version() not in _VERSIONS:
            self._fail(_version_unknown())
        if not self.url.startswith(b"/"):
            self._take_authority()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(ApiError(400, f"more than {MAX_PIPELINED} pipelined requests", code="pipelining"))
        probing = False
        if not self._table.has_room(self, len(self.connections)):
            probing = self.url.partition(b"?")[0] in self._table.probes
            if not probing:
                self._fail(_too_many(self._table.limit))
        held = self.scope["quire.held"] = Held()  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self.cycle.transport = _Answering(self)  # type: ignore[assignment]
        self.scope["quire.arrived"] = self.cycle.message_event.is_set  # type: ignore[typeddict-unknown-key]
        self._in_body = True
        if probing:
            self.cycle.keep_alive = False
        elif (memory := self._memory()) is not None:
            try:
                memory.take_head(held, self._header_bytes, self._headers_seen)
            except ApiError as error:
                self._fail(error)

    def _memory(self) -> RequestMemory | None:
        """The memory that bodies are charged to; None while there is no engine and requests are refused unread."""
        memory = self._table.memory
        return memory if memory is not None and memory.bodies.limit else None

    def _take_authority(self) -> None:
        """The host of an absolute target replaces the Host header (RFC 9112, section 3.2.2)."""
        if self.url == b"*":
            return
        target = httptools.parse_url(self.url)
        if target.schema not in {b"http", b"https"}:
            self._fail(
                ApiError(400, "the request target is neither a path nor an http URL", code="invalid_http")
            )
        host = b"[%b]" % target.host if b":" in target.host else target.host
        if target.port is not None:
            host += b":%d" % target.port
        if self.parser.get_http_version() == "1.0" and all(name != b"host" for name, _ in self.headers):
            self.headers.append((b"host", host))
        self.headers[:] = [(name, host if name == b"host" else value) for name, value in self.headers]
        self.url = (target.path or b"/") + (b"?" + target.query if target.query else b"")

    def on_body(self, body: bytes) -> None:
        beside = self._beside - 2 * len(body)
        self._beside = beside if beside > -_CREDIT else -_CREDIT
        self._arrived += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            error = self._take_body()
            if error is not None:
                self._fail(error)
            self._in_body, self._beside = False, 0
            super().on_message_complete()

    def _take_body(self) -> ApiError | None:
        """Take memory for the part of a body that has arrived; returns an error if there is none."""
        size, self._arrived = self._arrived, 0
        memory = self._memory()
        if size and memory is not None and not self.cycle.response_complete:
            try:
                memory.take_body(self.cycle.scope["quire.held"], size)  # type: ignore[typeddict-item]
            except ApiError as error:
                return error
        return None

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.send_chunks()
        super().on_response_complete()
        if not self._active.response_complete or self._ending or self.transport.is_closing():
            return
        if self._refusal is None:
            self._table.idle[self] = None
            if not self._has_buffer():
                self.transport.close()
        elif self._in_body:  # the refusal has been answered
            self._linger()
        else:
            self._answer_refusal(self._refusal)

    def end(self) -> None:
        """Close after an answer, once the rest of its request has been read."""
        self.send_chunks()
        if self._in_body and not self.pipeline:
            self._linger()
        else:
            self.transport.close()

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
        if self._socket is not None:  # still in the handshake
            self.drop()
            return
        if not self._in_headers:  # there was no request
            self.transport.close()
            return
        message = f"the headers were not complete after {self._table.header_seconds:g} s"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        error = self._pending
        if error is None and self.parser.get_http_version() not in {*_VERSIONS, "0.0"}:
            error = _version_unknown()
        self._refuse(error or ApiError(400, "not a valid HTTP request", code="invalid_http", close=True))

    def _refuse(self, error: ApiError) -> None:
        """Accept no more requests, and close after the answers to earlier ones, at whatever point parsing stopped.

        The application answers an error within a body, unless it has already sent its answer.
        """
        self._refusal = error
        self._deaf = True
        self._stop_timer()
        if self._in_headers:  # and the parser keeps the rest
            self.headers, self.parser = [], httptools.HttpRequestParser(self)
            self._table.has_buffer(self, self._grown)
        if self._in_body:
            self.cycle.scope["quire.refused"] = error  # type: ignore[typeddict-unknown-key]
            self.cycle.message_event.set()
        active = self._active
        if active is None or active.response_complete:
            if self._in_body:
                self._linger()
            else:
                self._answer_refusal(error)

    def _answer_refusal(self, error: ApiError) -> None:
        body = OPENAI_ERRORS.body(error)
        headers = [
            (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"), *error.headers,
        ]  # fmt: skip
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        if self._table.access_log:
            log_refusal(error)
        self._linger()

    def _linger(self) -> None:
        """Close, but keep reading for a while."""
        self._deaf = self._ending = True
        self._stop_timer()
        if self.transport.can_write_eof():  # not TLS: its clients know the end from the length
            self.transport.write_eof()
        if self not in self._table.beyond:
            self._table.idle[self] = None  # the first to be closed when there are too many
        self._linger_on(self.loop.time() + _LINGER_SECONDS, -1)

    def _linger_on(self, end: float, before: int) -> None:
        """Close if nothing has arrived since `before` bytes, or at `end`; otherwise keep waiting."""
        if self._read_bytes == before or self.loop.time() > end:
            self.transport.close()
        else:
            self._timer = self.loop.call_later(_LINGER_SILENCE, self._linger_on, end, self._read_bytes)


class _Answering:
    """The transport as one request's answer uses it. The head waits for what follows it in the same callback: each
    write is a packet, and on the way to a reader that waits costs more than making the head does.
    """

    __slots__ = ("_begun", "_connection", "close", "is_closing")

    def __init__(self, connection: LimitedProtocol) -> None:
        self._connection, self._begun = connection, False
        self.is_closing = connection.transport.is_closing
        self.close = connection.end

    def write(self, data: bytes) -> None:
        """Send a part of the answer, of which the first one is the head."""
        if self._begun:
            self._connection.write(self._connection.behind_queued(data))
        else:
            self._begun = True
            self._connection.send_later(data)


def _headers_too_large() -> ApiError:
    limit = f"{MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes"
    message = f"headers, trailers and chunk framing are over the limit of {limit}"
    return ApiError(431, message, code="headers_too_large", close=True)


def _no_buffer(table: Connections) -> ApiError:
    message = (
        f"incomplete requests buffer {format_size(table.buffered)} of their limit of {format_size(table.buffers)}; "
        "try again"
    )
    return ApiError(503, message, code="memory_full", headers=[(b"retry-after", b"1")], close=True)


def _version_unknown() -> ApiError:
    message = "this HTTP version is not supported; use HTTP/1.1 or HTTP/1.0"
    return ApiError(505, message, code="http_version_not_supported")


def _too_many(limit: int) -> ApiError:
    return ApiError(
        429, f"the limit of {limit} connections with requests is reached; try again",
        code="too_many_connections", headers=[(b"retry-after", b"1")],
    )  # fmt: skip
