"""A small HTTP/1.1 client on asyncio and httptools that notes when every byte came.

One request a connection at a time, connections kept and used again. No redirects, no proxies, no cookies: a benchmark
talks to one server and nothing may happen behind its back.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from quire.types import QuireError

Clock = Callable[[], float]
MAX_BODY_BYTES = 64 << 20  # of an answer that is not a stream
MAX_HEADER_BYTES = 64 << 10


class ClientError(QuireError):
    """A request that got no usable answer. The message is one line and starts with the kind of failure."""


class Exchange(Protocol):
    """Whoever waits for an answer."""

    def start(self, status: int, headers: dict[str, str]) -> None:
        """The headers are in."""

    def data(self, chunk: bytes, at: float) -> None:
        """A part of the body, and when the read that brought it happened."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is. Made by `target`."""

    host: str
    port: int
    base: str  # path before the routes, without a slash at its end
    tls: bool
    headers: dict[str, str] = field(default_factory=dict)
    insecure: bool = False

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base}"


def target(url: str, headers: dict[str, str] | None = None, *, insecure: bool = False) -> Target:
    """Read a server's address. A trailing /v1 is dropped, as the routes bring theirs. Raises ValueError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"url: {url!r} is not like http://host:port")
    if parts.username or parts.query or parts.fragment:
        raise ValueError(f"url: {url!r}: neither a user, a query nor a fragment belongs here")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"url: {url!r}: the port is not a number up to 65535") from None
    for name, value in (headers or {}).items():
        if any(ch in name + value for ch in "\r\n\0"):
            raise ValueError(f"header: {name!r} holds a line break")
    tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, port or (443 if tls else 80), base, tls, dict(headers or {}), insecure)


class Connection(asyncio.Protocol):
    """One connection, kept between requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._exchange: Exchange | None = None
        self._reset()
        self.usable = True
        self.answers = 0

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self._at = self._clock()
        self._bytes += len(data)
        if self._done is None or self._done.done():
            self.close()  # nobody asked
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
        if status < 200:  # 100 Continue and such
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
        self.answers += 1
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    # ---- the caller's side

    @property
    def bytes_received(self) -> int:
        """Of the answer being read, or the last one."""
        return self._bytes

    async def send(self, head: bytes, body: bytes, exchange: Exchange, sent: Callable[[float], None]) -> None:
        """Send a request and wait until its answer is over. `sent` is told when the first byte is handed over.

        Raises ClientError. The connection is closed by a failure and by cancellation.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            self.usable = False
            raise ClientError("connection closed without an answer")
        self._reset()
        self._exchange = exchange
        self._done = asyncio.get_running_loop().create_future()
        sent(self._clock())
        transport.write(head + body)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._exchange = self._done = None
        if not self.usable:
            self.close()

    def close(self) -> None:
        """Hang up. Never raises."""
        self.usable = False
        if self._transport is not None:
            self._transport.close()

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
    """Connections to one server. `clock` gives the seconds that are noted."""

    def __init__(
        self, server: Target, clock: Clock = time.perf_counter, *, connect_timeout: float = 10.0
    ) -> None:
        self.server = server
        self.clock = clock
        self.opened = 0
        self._idle: list[Connection] = []
        self._connect_timeout = connect_timeout
        self._tls = _tls(server)

    async def post(
        self, path: str, body: bytes, exchange: Exchange, sent: Callable[[float], None] = lambda _at: None
    ) -> None:
        """Send JSON. Raises ClientError when no whole answer came; its status is the exchange's to judge."""
        await self._request("POST", path, body, exchange, sent)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises ClientError."""
        answer = Whole()
        await self._request("GET", path, b"", answer, lambda _at: None)
        return answer.status, answer.body

    async def close(self) -> None:
        """Hang up all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)

    async def _request(
        self, method: str, path: str, body: bytes, exchange: Exchange, sent: Callable[[float], None]
    ) -> None:
        head = self._head(method, path, len(body))
        connection = self._kept() or await self._open()
        try:
            await connection.send(head, body, exchange, sent)
        except ClientError:
            # A server may drop an idle connection just as it is used again: once more on a new one, while the
            # request's clock runs on. Where the answer had begun, the server saw the request.
            if not connection.answers or connection.bytes_received:
                raise
            connection = await self._open()
            await connection.send(head, body, exchange, sent)
        if connection.usable:
            self._idle.append(connection)

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _open(self) -> Connection:
        loop, server = asyncio.get_running_loop(), self.server
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(self.clock), server.host, server.port, ssl=self._tls
                )
        except TimeoutError:
            raise ClientError(
                f"connect: no answer from {server.authority} within {self._connect_timeout:g} s"
            ) from None
        except OSError as error:
            raise ClientError(f"connect: {server.authority}: {error.strerror or error}") from None
        self.opened += 1
        return connection

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {self.server.base}{path} HTTP/1.1", f"host: {self.server.authority}"]
        lines += ["accept: text/event-stream, application/json, */*", "user-agent: quire-bench"]
        if method == "POST":
            lines += ["content-type: application/json", f"content-length: {length}"]
        lines += [f"{name}: {value}" for name, value in self.server.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Whole:
    """Collects an answer that is not a stream."""

    def __init__(self) -> None:
        self.status = 0
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    def start(self, status: int, headers: dict[str, str]) -> None:  # noqa: ARG002
        self.status = status

    def data(self, chunk: bytes, at: float) -> None:  # noqa: ARG002
        self._size += len(chunk)
        if self._size > MAX_BODY_BYTES:
            raise ClientError(f"bad answer: more than {MAX_BODY_BYTES} bytes")
        self._parts.append(chunk)


def _tls(server: Target) -> ssl.SSLContext | None:
    if not server.tls:
        return None
    context = ssl.create_default_context()
    if server.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
