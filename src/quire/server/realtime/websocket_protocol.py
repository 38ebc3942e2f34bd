"""A WebSocket connection. Imported with the first one: needs the package `websockets`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from quire.server.exchange import ChunkPiece
from quire.server.queued_writes import QueuedWrites

if TYPE_CHECKING:
    from quire.server.protocol import LimitedProtocol

# Answers to pings that a client may leave unread; messages that are queued in one callback.
_UNREAD_BYTES = 64 * 1024


class WebSocketConnection(QueuedWrites, WebSocketsSansIOProtocol):
    """Ends when its peer does not read: see `waiting`, which the server asks of every connection.

    Adds scope["quire.writer"], this connection, whose `write_text` sends a message at the end of the current callback.
    """

    __slots__ = ("_sends",)

    def __init__(self, before: LimitedProtocol, config: Config) -> None:
        """Continue the connection of `before`."""
        QueuedWrites.__init__(self, before._line)
        WebSocketsSansIOProtocol.__init__(self, config, before.server_state, before.app_state)
        self._wire, self._file = before._wire, before._file
        self._unread, self._unread_seconds = 0, 0.0
        # Between accepting and closing. Other ends close the transport at once, and chunks are discarded.
        self._sends = False

    @property
    def queues(self) -> bool:
        """Whether a message may be queued without waiting for the client."""
        return not self.paused and len(self._chunks) < _UNREAD_BYTES

    def write_text(self, text: ChunkPiece, more: ChunkPiece = b"", end: ChunkPiece = b"") -> None:
        """Queue a message of text in UTF-8 in up to three pieces (RFC 6455, section 5.2); it is lost if the connection
        is closing.
        """
        if not self._sends:
            return
        size = len(text) + len(more) + len(end)
        if size < 126:
            self.send_later(b"\x81%c%b%b%b" % (size, text, more, end))  # type: ignore[str-format]
        elif size < 65536:
            self.send_later(b"\x81\x7e%c%c%b%b%b" % (size >> 8, size & 255, text, more, end))  # type: ignore[str-format]
        else:
            self.send_later(b"\x81\x7f%b%b%b%b" % (size.to_bytes(8, "big"), text, more, end))  # type: ignore[str-format]

    async def send(self, message: Any) -> None:
        """Send a message, behind those that are queued."""
        if self._chunks:
            self.send_chunks()
        if message["type"] != "websocket.send":
            self._sends = False
        await super().send(message)
        if message["type"] == "websocket.accept":
            self._sends = not self.transport.is_closing()

    def pause_writing(self) -> None:
        """The transport is full."""
        super().pause_writing()
        self.paused = True

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        self.paused = False

    def waiting(self, passed: float) -> float:
        """Seconds that output has been left unread, as of this call, `passed` seconds after the previous one."""
        size = self.transport.get_write_buffer_size()
        self._unread_seconds = self._unread_seconds + passed if size and size >= self._unread else 0.0
        self._unread = size
        return self._unread_seconds

    def end_slow_reader(self) -> None:
        """Drop the connection and discard its buffered output."""
        self.transport.abort()

    def handle_ping(self) -> None:
        """Answer a ping, unless its answers are left unread."""
        if self.transport.get_write_buffer_size() > _UNREAD_BYTES:
            self.transport.abort()
        else:
            super().handle_ping()

    async def run_asgi(self) -> None:
        """Run the application, and close."""
        self.scope["quire.writer"] = self  # type: ignore[typeddict-unknown-key]
        try:
            await self.app(self.scope, self.receive, self.send)
        except ClientDisconnected:
            pass
        finally:
            self.send_500_response()  # unless there has been an answer to the handshake
            if self.close_timer is None:
                self.transport.close()
