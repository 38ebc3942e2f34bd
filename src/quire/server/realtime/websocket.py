"""uvicorn's WebSocket protocol with limits on what a connection may hold, and how an HTTP connection becomes one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.config import Config

if TYPE_CHECKING:
    from quire.server.protocol import LimitedProtocol

PATH = b"/v1/realtime"
SUBPROTOCOL = "realtime"
MAX_MESSAGE_BYTES = 256 * 1024
_PING_SECONDS = 20.0


def take_over(connection: LimitedProtocol, rest: bytes) -> bool:
    """Continue a connection, whose headers have just been read, as a WebSocket if they ask for one and it may. `rest`
    follows the headers. Without the package the route answers, and says what to install.
    """
    wanted = dict(connection.headers).get(b"upgrade", b"").lower() == b"websocket"
    if not wanted or connection.url.partition(b"?")[0] != PATH:
        return False
    try:
        from quire.server.realtime.websocket_protocol import WebSocketConnection
    except ModuleNotFoundError:
        return False
    head = connection.hand_over()
    if head is None:
        return False
    socket = WebSocketConnection(connection, _limited(connection.config))
    socket.connection_made(connection.transport)
    connection.transport.set_protocol(socket)
    connection.heir = socket
    socket.data_received(head + rest)
    return True


def _limited(config: Config) -> Config:
    """The options that uvicorn's protocol reads. Without compression: it would take memory for each connection."""
    config.ws_max_size, config.ws_per_message_deflate = MAX_MESSAGE_BYTES, False
    config.ws_ping_interval = config.ws_ping_timeout = _PING_SECONDS
    return config
