"""A tool server behind a URL: streamable HTTP, one POST a message, answered by JSON or a stream of events."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from quire.mcp.session import MAX_MESSAGE_BYTES, McpError, Message

_PIECE = 64 * 1024
_Posted = tuple[http.client.HTTPConnection, http.client.HTTPResponse]


class HttpTransport:
    """Sends messages to a URL, with `headers`. Redirects are not followed."""

    def __init__(self, name: str, url: str, headers: Mapping[str, str]) -> None:
        self._name, self._parts = name, urlsplit(url)
        self._headers = {
            **headers,
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        }

    def exchange(self, message: Message, deadline: float, /) -> Iterator[Message]:
        with self._posted(message, deadline) as (connection, response):
            session = response.headers.get("Mcp-Session-Id")
            if session is not None:
                self._headers["Mcp-Session-Id"] = session
            if response.headers.get_content_type() == "text/event-stream":
                yield from self._events(connection, response, deadline)
            else:
                yield self._parse(self._body(connection, response, deadline))

    def notify(self, message: Message, deadline: float, /) -> None:
        with self._posted(message, deadline):
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
    def _posted(self, message: Message, deadline: float) -> Iterator[_Posted]:
        """A message on its way: its connection, and the response, whose status is good."""
        connection = self._connect(deadline)
        try:
            response = self._send(connection, "POST", json.dumps(message).encode())
            if response.status >= 300:
                raise self._error(f"answered with HTTP status {response.status}")
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
        body = b""
        for piece in self._pieces(connection, response, deadline):
            body += piece
            if len(body) > MAX_MESSAGE_BYTES:
                raise self._error(f"sent a message of more than {MAX_MESSAGE_BYTES} bytes")
        return body

    def _events(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float
    ) -> Iterator[Message]:
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
                    yield self._parse(b"\n".join(data))
                    data.clear()
                    size = len(rest)
            if size > MAX_MESSAGE_BYTES:
                raise self._error(f"sent a message of more than {MAX_MESSAGE_BYTES} bytes")

    def _parse(self, text: bytes) -> Message:
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise self._error(f"sent a message that is not a JSON object: {text[:80]!r}")
        return message

    def _error(self, text: str) -> McpError:
        return McpError(f"MCP server {self._name!r} {text}")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
