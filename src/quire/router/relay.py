"""An answer on its way from a server to a client."""

from __future__ import annotations

import asyncio

from quire.server.exchange import ChunkWriter, Exchange
from quire.util.http_client import ClientConnection, ClientError

WHOLE_BYTES = 2**20  # an answer of a known length up to this is sent when it is complete
_AHEAD_BYTES = 256 * 1024  # of a stream, kept while its client does not read
_ENDS = 4096  # bytes at the beginning and the end that are looked at
_HOP = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "content-length", "date", "server", "x-request-id", "request-id", "x-content-type-options",
))  # fmt: skip


class Relay:
    """Receives an answer. In `stream` its parts are sent as they come; while the client does not read, the server is
    not read either.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.status = 0
        self.headers: dict[str, str] = {}
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.beginning = self.end = b""  # what was looked at when the answer has ended
        self._kept: list[bytes] = []
        self._size = 0
        self._writer: ChunkWriter | None = None
        self._stuck = asyncio.Event()
        self._connection: ClientConnection | None = None

    # ---- the connection's side

    def take(self, connection: ClientConnection) -> None:
        """Take the connection from which the answer will come."""
        self._connection = connection

    def start(self, status: int, headers: dict[str, str]) -> None:
        """Take status and headers."""
        self.status, self.headers = status, dict(headers)
        if not self.begun.done():
            self.begun.set_result(None)

    def data(self, chunk: bytes, at: float) -> None:  # noqa: ARG002
        """Take a part, and send it if that is possible."""
        self.end = chunk if len(chunk) >= _ENDS else self.end[-_ENDS:] + chunk if len(chunk) < 512 else chunk
        if not self.beginning:
            self.beginning = chunk[:_ENDS]
        if self._writer is not None and not self._kept:
            sent = self._writer.write_chunk(b"", chunk, b"")
            if sent:
                self._exchange.bytes_out += sent
                return
        self._kept.append(chunk)
        self._size += len(chunk)
        if self.is_whole:
            if self._size > WHOLE_BYTES:
                raise ClientError("bad answer: longer than its content-length")
            return
        self._stuck.set()
        if self._size > _AHEAD_BYTES and self._connection is not None:
            self._connection.pause()

    # ---- the request's side

    @property
    def is_stream(self) -> bool:
        """Whether it consists of server-sent events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_whole(self) -> bool:
        """Whether it is short enough to be sent when it is complete."""
        length = self.headers.get("content-length", "")
        return length.isdigit() and int(length) <= WHOLE_BYTES

    @property
    def body(self) -> bytes:
        """What has been kept."""
        return b"".join(self._kept)

    def passed_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that are the answer's own, not those of its connection."""
        return [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in self.headers.items()
            if name not in _HOP and name != "content-type" and not name.startswith("access-control-")
        ]

    async def stream(self, request: asyncio.Task[None]) -> None:
        """Send the answer, whose response has started, until `request` ends. Raises ClientError if it is cut off."""
        self._writer = self._exchange.direct_writer()
        stuck = asyncio.create_task(self._stuck.wait())
        try:
            while not request.done():
                await asyncio.wait((request, stuck), return_when=asyncio.FIRST_COMPLETED)
                if stuck.done():
                    await self._send_kept()
                    stuck = asyncio.create_task(self._stuck.wait())
        finally:
            stuck.cancel()
        await self._send_kept()
        request.result()

    async def _send_kept(self) -> None:
        self._stuck.clear()
        while self._kept:
            kept, self._kept, self._size = self.body, [], 0
            await self._exchange.write(kept)  # waits while the client does not read
        if self._connection is not None:
            self._connection.resume()
