"""A server of HTTP/1.1 that does next to nothing, to stand behind what is measured."""

from __future__ import annotations

import asyncio
from typing import Any

_MODELS = b'{"object":"list","data":[{"id":"m"}]}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class BareConnection(asyncio.Protocol):
    """A connection, which gives `posted` the body of each POST and answers anything else with the list of models."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self._rest = transport, b""

    def data_received(self, data: bytes) -> None:
        self._rest += data
        head, found, body = self._rest.partition(b"\r\n\r\n")
        sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if not found or len(body) < (int(sizes[0].partition(b":")[2]) if sizes else 0):
            return
        self._rest = b""
        if head.startswith(b"POST"):
            self.posted(body)
        else:
            self.answer(_MODELS)

    def answer(self, body: bytes) -> None:
        """Write a whole answer of JSON."""
        self.transport.write(_HEAD % len(body) + body)

    def posted(self, body: bytes) -> None:
        """Answer a POST."""
        raise NotImplementedError
