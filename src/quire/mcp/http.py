"""A tool server behind a URL: streamable HTTP, one POST a message, answered by JSON or a stream of events."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from functools import partial
from urllib.parse import urlsplit

from quire.mcp.session import Cancellation, Incoming, McpError, Message, read_message

_PIECE = 64 * 1024
_Posted = tuple[http.client.HTTPConnection, http.client.HTTPResponse]


class HttpTransport:
    """Sends messages to a URL, with `headers`. Redirects are not followed. An answer may have `max_bytes`."""

    broken = False  # each message has a connection of its own

    def __init__(self, name: str, url: str, headers: Mapping[str, str], max_bytes: int) -> None:
        self._name, self._parts, self._max_bytes = name, urlsplit(url), max_bytes
        self._headers = {
            **headers,
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        }

    def exchange(self, message: Message, deadline: float, stop: Cancellation, /) -> Iterator[Incoming]:
        with self._posted(message, deadline, stop) as (connection, response):
            session = response.headers.get("Mcp-Session-Id")
            if session is not None:
                self._headers["Mcp-Session-Id"] = session
            if response.headers.get_content_type() == "text/event-stream":
                yield from self._events(connection, response, deadline)
            else:
                yield read_message(self._name, self._body(connection, response, deadline))

    def notify(self, message: Message, deadline: float, /) -> None:
        with self._posted(message, deadline, Cancellation()):
            pass

    def agreed(self, version: str, /) -> None:
        self._headers["MCP-Protocol-Version"] = version

    def close(self) -> None:
        """End the session, if the server has one."""
        if "Mcp-Session-Id" not in self._headers:
            return
        connection = self._connect(time.monotonic() + 2.0)
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._send(connection, "DELETE", None)
        connection.close()

    @contextlib.contextmanager
    def _posted(self, message: Message, deadline: float, stop: Cancellation) -> Iterator[_Posted]:
        """A message on its way: its connection, and the response, whose status is good."""
        connection = self._connect(deadline)
        try:
            connection.connect()
            stop.watch(partial(_shut, connection))
            response = self._send(connection, "POST", json.dumps(message).encode())
            if (status := response.status) >= 300:
                lost = (
                    status == 404 and "Mcp-Session-Id" in self._headers
                )  # the server has forgotten the session
                raise self._error(f"answered with HTTP status {status}", status=status, lost=lost)
            yield connection, response
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise self._error(f"cannot be reached: {error}") from None
        finally:
            connection.close()

    def _connect(self, deadline: float) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(host, port, timeout=_left(deadline))

    def _send(
        self, connection: http.client.HTTPConnection, method: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        path = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        connection.request(method, path, body, dict(self._headers))
        return connection.getresponse()

    def _pieces(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float
    ) -> Iterator[bytes]:
        """The bytes of a body as they arrive, until the deadline."""
        while True:
            if connection.sock is not None:
                connection.sock.settimeout(_left(deadline))
            elif time.monotonic() > deadline:
                raise TimeoutError
            piece = response.read1(_PIECE)
            if not piece:
                return
            yield piece

    def _body(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float
    ) -> bytes:
        body = bytearray()
        for piece in self._pieces(connection, response, deadline):
            body += piece
            self._check(len(body))
        return bytes(body)

    def _events(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float
    ) -> Iterator[Incoming]:
        """The messages of a stream of server-sent events."""
        data: list[bytes] = []
        rest, size = b"", 0
        for piece in self._pieces(connection, response, deadline):
            *lines, rest = (rest + piece).split(b"\n")
            size = sum(map(len, data)) + len(rest)
            for ended in lines:
                line = ended.rstrip(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                    size += len(line)
                elif not line and data:
                    yield read_message(self._name, b"\n".join(data))
                    data.clear()
                    size = len(rest)
            self._check(size)

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise self._error(f"sent a message of more than {self._max_bytes} bytes")

    def _error(self, text: str, *, status: int = 0, lost: bool = False) -> McpError:
        return McpError(f"MCP server {self._name!r} {text}", status=status, lost=lost)


def _shut(connection: http.client.HTTPConnection) -> None:
    """End what another thread waits for."""
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
