"""What a connection writes at the end of the current callback, past its transport if that holds nothing."""

from __future__ import annotations

import os
from asyncio import AbstractEventLoop, Transport
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.server.connections import Connections


class QueuedWrites:
    """The part of a protocol that queues chunks. `paused`: the client does not read, and nothing may be queued.

    Fields that every token touches are kept together: caches are cold when the tokens of a step arrive.
    """

    loop: AbstractEventLoop
    __slots__ = ("_chunks", "_file", "_line", "_wire", "paused")

    def __init__(self, line: Connections) -> None:
        self._chunks = b""  # sent at the end of the current callback
        self._line = line
        self._wire: Transport
        self.paused = False  # same as self.flow.write_paused
        self._file = -1  # the socket, if this class may write to it directly

    def send_later(self, chunk: bytes) -> None:
        """Have bytes sent at the end of the current callback."""
        if self._chunks:
            self._chunks += chunk
        else:
            self._chunks = chunk
            self._line.send_soon(self)

    def behind_queued(self, data: bytes) -> bytes:
        """The chunks that were queued, and behind them what is sent now in their place."""
        chunks, self._chunks = self._chunks, b""
        return chunks + data

    def send_chunks(self) -> None:
        """Send the chunks that were queued; discard them if the client has gone.

        While nothing is buffered this writes to the socket directly: going through the transport costs a tenth of the
        time of a token. The transport handles what the socket does not accept, and all failures.
        """
        chunks, self._chunks = self._chunks, b""
        transport = self._wire
        if not chunks or transport.is_closing():
            return
        if self._file >= 0 and not transport.get_write_buffer_size():
            try:
                written = os.write(self._file, chunks)
            except OSError:
                written = 0
            if written == len(chunks):
                return
            chunks = chunks[written:]
        transport.write(chunks)
