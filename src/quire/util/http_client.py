"""A small HTTP/1.1 client on asyncio and httptools that records the time of every read.

One request at a time per connection; connections are reused. No redirects, proxies or cookies: benchmarks and routers
talk to servers that they were given, and all their requests are explicit.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from quire.records import dataclass
from quire.routing.addresses import is_server_url
from quire.types import QuireError
from quire.util.keepalive import end_when_gone

Clock = Callable[[], float]
SentBody = bytes | tuple[bytes | memoryview, ...]  # of a request: whole, or in parts, none of which is copied
MAX_BODY_BYTES = 64 << 20  # of an answer that is not a stream
MAX_HEADER_BYTES = 64 << 10
# A server that was started again while the way to it was cut never says that its connections are gone: the kernel asks
# after so many seconds without a byte, so often, and so many times.
_PROBES = 30, 10, 3
_UNREACHABLE = frozenset((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.ECONNRESET))


class ClientError(QuireError):
    """A request without a usable answer. The message is one line and starts with the kind of failure. `refused`: nobody
    listens there any more. `silent`: that, or nothing comes from there; false for what fails on this machine."""

    def __init__(self, message: str, *, refused: bool = False, silent: bool = False) -> None:
        super().__init__(message)
        self.refused, self.silent = refused, refused or silent


class UnreachedError(ClientError):
    """No connection: nothing of the request was sent."""


def body_size(body: SentBody) -> int:
    """Bytes of a body."""
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


class AnswerSink(Protocol):
    """The receiver of an answer."""

    def start(self, status: int, headers: dict[str, str]) -> None:
        """Take the headers."""

    def data(self, chunk: bytes, at: float) -> None:
        """Take a part of the body, and the time of the read that brought it."""


@dataclass(slots=True)
class SentRequest:
    """A request: `sink` takes its answer, `sent` the time at which its first byte is written, and `taken` the
    connection on which that is; both again if it has to be sent again."""

    head: bytes
    body: SentBody
    sink: AnswerSink
    sent: Callable[[float], None]
    taken: Callable[[ClientConnection], None]


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server. Made by `target`."""

    host: str
    port: int
    base: str  # path before the routes, without a slash at its end
    tls: bool
    headers: dict[str, str] = field(default_factory=dict)
    insecure: bool = False

    @property
    def authority(self) -> str:
        host = host_of_url(self.host)
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base}"


def host_of_url(host: str) -> str:
    """A name or address as a URL has it: an address of IPv6 stands in brackets (RFC 3986, 3.2.2)."""
    return f"[{host}]" if ":" in host else host


def target(url: str, headers: dict[str, str] | None = None, *, insecure: bool = False) -> Target:
    """Parse the address of a server. A trailing /v1 is dropped, because the routes contain it. Raises ValueError."""
    whole = url if "://" in url else f"http://{url}"
    if not is_server_url(whole):
        raise ValueError(
            f"url: {url!r} does not have the form http://host:port, without user, query and fragment"
        )
    parts = urlsplit(whole)
    assert parts.hostname is not None
    for name, value in (headers or {}).items():
        if any(ch in name + value for ch in "\r\n\0"):
            raise ValueError(f"header: {name!r} contains a line break")
    tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Target(
        parts.hostname, parts.port or (443 if tls else 80), base, tls, dict(headers or {}), insecure
    )


class ClientConnection(asyncio.Protocol):
    """One connection, kept between requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._exchange: AnswerSink | None = None
        self._reset()
        self.usable = True

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self._at = self._clock()
        self._bytes += len(data)
        if self._done is None or self._done.done():
            self.close()  # no request is in progress
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(str(error.__cause__ or error.__context__ or error))
        except httptools.HttpParserError as error:
            self._fail(f"bad answer: {error}")
        if self._status == 0 and self._bytes > MAX_HEADER_BYTES:
            self._fail("bad answer: headers without end")

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._done is None or self._done.done():
            return
        if self._status and not self._framed and exc is None:
            self._done.set_result(None)  # a body without a length ends with the connection
            return
        what = "answer cut off" if self._bytes else "connection closed without an answer"
        self._fail(f"{what}: {exc}" if exc else what)

    # ---- the parser's side

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        self._headers[key] = value.decode("latin-1")
        self._framed |= key in {"content-length", "transfer-encoding"}

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # such as 100 Continue
            return
        self._status = status
        if self._exchange is not None:
            self._exchange.start(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.data(body, self._at)

    def on_message_complete(self) -> None:
        if self._status == 0:  # the end of a 1xx
            self._headers.clear()
            return
        self.usable = self.usable and self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    # ---- the caller's side

    @property
    def bytes_received(self) -> int:
        """Bytes of the current or last answer."""
        return self._bytes

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent; the end of a connection is seen a turn of the loop before it is lost."""
        return self.usable and self._transport is not None and not self._transport.is_closing()

    def begin(self, request: SentRequest) -> None:
        """Send a request; `end` has to follow. Raises ClientError."""
        request.taken(self)
        self._reset()
        transport = self._transport
        if transport is None or transport.is_closing():
            self.usable = False
            raise ClientError("connection closed without an answer")
        self._exchange = request.sink
        self._done = asyncio.get_running_loop().create_future()
        request.sent(self._clock())
        body = request.body
        transport.writelines((request.head, *((body,) if isinstance(body, bytes) else body)))

    async def end(self) -> None:
        """Wait for the end of the answer. Raises ClientError. A failure or cancellation closes the connection."""
        assert self._done is not None
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._exchange = self._done = None
        if not self.usable:
            self.close()

    def abandon(self) -> None:
        """Hang up: nobody waits for the answer any more."""
        self._exchange = self._done = None
        self.close()

    def pause(self) -> None:
        """Read no more of the answer until `resume`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Go on reading."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Hang up. Never raises."""
        self.usable = False
        if self._transport is not None:
            self._transport.close()

    def give_up(self, why: str) -> None:
        """Hang up, and fail the request in progress."""
        self._fail(why)

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._status = self._bytes = 0
        self._framed = False
        self._at = 0.0

    def _fail(self, message: str) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(ClientError(message))
        if self._transport is not None:
            self._transport.close()


class Client:
    """Connections to one server. `clock` gives the recorded times in seconds."""

    def __init__(
        self,
        server: Target,
        clock: Clock = time.perf_counter,
        *,
        connect_timeout: float = 10.0,
        authorities: Path | None = None,
        connected: type[ClientConnection] = ClientConnection,
    ) -> None:
        """Of `authorities`, if given, the server's certificate has to be. `connected`: the kind of its connections.
        Raises OSError if the authorities cannot be read."""
        self.server = server
        self.clock = clock
        self.opened = 0
        self._idle: list[ClientConnection] = []
        self._address: tuple[str, int] | None = None  # of the last connection, whose name is resolved
        self._connect_timeout, self._connected = connect_timeout, connected
        self._tls = _tls(server, authorities)

    async def post(
        self, path: str, body: bytes, exchange: AnswerSink, sent: Callable[[float], None] = lambda _at: None
    ) -> None:
        """Send JSON. Raises ClientError if the answer is incomplete; the exchange judges its status."""
        await self.request(self._head("POST", path, len(body)), body, exchange, sent)

    async def get(self, path: str, sent: Callable[[float], None] = lambda _at: None) -> tuple[int, bytes]:
        """Get status and body. Raises ClientError."""
        answer = Whole()
        await self.request(self._head("GET", path, 0), b"", answer, sent)
        return answer.status, answer.body

    async def close(self) -> None:
        """Hang up all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)

    async def request(
        self,
        head: bytes,
        body: SentBody,
        exchange: AnswerSink,
        sent: Callable[[float], None] = lambda _at: None,
    ) -> None:
        """Send a request with a head of the caller's, and wait for the end of its answer.

        Raises ClientError if the answer is incomplete, UnreachedError if nothing was sent.
        """
        request = SentRequest(head, body, exchange, sent, lambda _connection: None)
        await self._end(request, self._begin(request))

    def requested(
        self, head: bytes, body: SentBody, exchange: AnswerSink, taken: Callable[[ClientConnection], None]
    ) -> asyncio.Task[None]:
        """The same as a task. Where a connection is kept, the request is sent before the task runs: while streams keep
        the loop busy, that is as much later as all that comes in one turn of it takes."""
        request = SentRequest(head, body, exchange, lambda _at: None, taken)
        begun = self._begin(request)
        task = asyncio.create_task(self._end(request, begun))
        if begun is not None:  # a task that is cancelled before it runs closes nothing
            task.add_done_callback(lambda ended: begun.abandon() if ended.cancelled() else None)
        return task

    def _begin(self, request: SentRequest) -> ClientConnection | None:
        """The kept connection on which a request was sent; None without one."""
        connection = self._kept()
        if connection is not None:
            connection.begin(request)
        return connection

    async def _end(self, request: SentRequest, begun: ClientConnection | None) -> None:
        """See request. `begun`: the connection on which it was sent."""
        connection = begun
        if connection is not None:
            try:
                await connection.end()
            except ClientError:
                # A server may close an idle connection just as it is reused: try once more on a new one, while the
                # clock of the request runs on. If the answer had begun, the server saw the request.
                if connection.bytes_received:
                    raise
                connection = None
        if connection is None:
            try:
                connection = await self._open()
            except UnreachedError as error:
                if begun is None:
                    raise
                raise ClientError(
                    str(error), refused=error.refused, silent=error.silent
                ) from None  # the first may have brought it
            connection.begin(request)
            await connection.end()
        if connection.usable:
            self._idle.append(connection)

    async def handshake(self, seconds: float) -> float:
        """How long it takes to connect, without TLS and without a request: the shorter of two times, less what this
        loop is late. Raises UnreachedError, also if it takes longer than so many seconds."""
        loop, took = asyncio.get_running_loop(), float("inf")
        host, port = self._address or (self.server.host, self.server.port)
        try:
            async with asyncio.timeout(seconds):
                for _ in range(2):
                    began = self.clock()
                    transport, _ = await loop.create_connection(asyncio.Protocol, host, port)
                    made = self.clock()
                    transport.close()
                    await asyncio.sleep(0)
                    late = self.clock() - made
                    took = min(took, max(made - began - 2 * late, 0.0))
        except (OSError, UnicodeError, TimeoutError) as error:
            raise UnreachedError(f"connect: {self.server.authority}: {error}") from None
        return took

    def _kept(self) -> ClientConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _open(self) -> ClientConnection:
        loop, server = asyncio.get_running_loop(), self.server
        try:
            async with asyncio.timeout(self._connect_timeout):
                transport, connection = await loop.create_connection(
                    lambda: self._connected(self.clock), server.host, server.port, ssl=self._tls
                )
        except TimeoutError:
            raise UnreachedError(
                f"connect: no answer from {server.authority} within {self._connect_timeout:g} s",
                silent=True,
            ) from None
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have, such as a..b
            why = getattr(error, "strerror", None) or error
            refused = isinstance(error, ConnectionRefusedError)
            silent = getattr(error, "errno", None) in _UNREACHABLE
            raise UnreachedError(
                f"connect: {server.authority}: {why}", refused=refused, silent=silent
            ) from None
        self.opened += 1
        end_when_gone(transport.get_extra_info("socket"), *_PROBES)
        self._address = (transport.get_extra_info("peername") or (server.host, server.port))[:2]
        return connection

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {self.server.base}{path} HTTP/1.1", f"host: {self.server.authority}"]
        lines += ["accept: text/event-stream, application/json, */*", "user-agent: quire-bench"]
        if method == "POST":
            lines += ["content-type: application/json", f"content-length: {length}"]
        lines += [f"{name}: {value}" for name, value in self.server.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Whole:
    """Collects an answer that is not streamed, of so many bytes at most."""

    def __init__(self, most: int = MAX_BODY_BYTES) -> None:
        self.status = 0
        self._most = most
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    def start(self, status: int, headers: dict[str, str]) -> None:  # noqa: ARG002
        self.status = status

    def data(self, chunk: bytes, at: float) -> None:  # noqa: ARG002
        self._size += len(chunk)
        if self._size > self._most:
            raise ClientError(f"bad answer: more than {self._most} bytes")
        self._parts.append(chunk)


def _tls(server: Target, authorities: Path | None) -> ssl.SSLContext | None:
    if not server.tls:
        return None
    context = ssl.create_default_context(cafile=authorities)
    if server.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
