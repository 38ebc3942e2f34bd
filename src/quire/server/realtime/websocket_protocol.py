"""A WebSocket connection. Imported with the first one: needs the package `websockets`."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

# Answers to pings that a client may leave unread.
_UNREAD_BYTES = 64 * 1024


class WebSocketConnection(WebSocketsSansIOProtocol):
    """Ends when its peer does not read: see `waiting`, which the server asks of every connection."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._unread, self._unread_seconds = 0, 0.0

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
        try:
            await self.app(self.scope, self.receive, self.send)
        except ClientDisconnected:
            pass
        finally:
            self.send_500_response()  # unless there has been an answer to the handshake
            if self.close_timer is None:
                self.transport.close()
