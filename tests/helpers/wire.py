"""The HTTP protocol without a socket: feed it bytes, and see what it writes."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from quire.server.connections import Connections
from quire.server.protocol import LimitedProtocol


class Wire(asyncio.Transport):
    """Records what is written, in a list that all wires share."""

    def __init__(self, name: str, log: list[tuple[str, bytes]], extra: dict[str, Any] | None = None) -> None:
        super().__init__(extra)
        self.name, self.log, self.closing, self.buffered = name, log, False, 0

    def write(self, data: Any) -> None:
        self.log.append((self.name, bytes(data)))

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def sent(self) -> bytes:
        return b"".join(data for _, data in self.log)


def connect(
    table: Connections, names: str, log: list[tuple[str, bytes]], extra: dict[str, Any] | None = None
) -> list[tuple[LimitedProtocol, Wire]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Says what it was sent; /early without reading it, /never never."""
        body, more = b"", scope["path"] != "/early"
        if scope["path"] == "/never":
            await asyncio.Event().wait()
        while more:
            message = await receive()
            if "quire.refused" in scope:
                await send({"type": "http.response.start", "status": scope["quire.refused"].status})
                await send({"type": "http.response.body"})
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        said = scope["path"].encode() + b" " + body
        headers = [(b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    config = Config(app, interface="asgi3", log_config=None)
    config.load()
    pairs = []
    for name in names:
        protocol, wire = LimitedProtocol(table, config, ServerState(), {}), Wire(name, log, extra)
        protocol.admit()
        protocol.connection_made(wire)
        pairs.append((protocol, wire))
    return pairs


async def ask(*pieces: bytes) -> bytes:
    """The answer to bytes that arrive in several reads."""
    ((server, wire),) = connect(Connections(10, 600.0), "a", [])
    for piece in pieces:
        if not wire.closing:
            server.data_received(piece)
        await turns()
    for _ in range(16):  # there may be so many requests
        await turns()
    server.connection_lost(None)
    return wire.sent()


async def turns() -> None:
    for _ in range(8):  # more than an answer needs
        await asyncio.sleep(0)
