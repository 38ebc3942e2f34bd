"""The connections of one server: accepted from the listening socket a few at a time, and counted from that moment."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol

from quire.records import dataclass
from quire.server.logs import log
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.server.request_memory import RequestMemory

# Connections beyond the limit: they may ask for a health probe, and get an error for anything else.
SPARE = 16
# Connections accepted per turn of the event loop, so that those they replace are closed first.
_BATCH = 16
# Descriptors kept for other uses: the engine's socket and pipes at a restart, files that are read.
_OTHER_DESCRIPTORS = 64
_PAUSE_SECONDS = 0.1


class TooFewDescriptorsError(QuireError):
    """The process may not open enough files to serve connections."""


class QueuedSender(Protocol):
    """A connection with chunks to send."""

    loop: asyncio.AbstractEventLoop

    def send_chunks(self) -> None:
        """Send the chunks that were queued."""


class Connection(QueuedSender, Protocol):
    """What the table of connections needs from each connection; implemented by server/protocol."""

    buffered: int  # bytes

    def drop(self) -> None:
        """Close it to make room for another."""

    def refuse_buffer(self) -> None:
        """Release its buffer: all buffers together are over their limit."""

    def __hash__(self) -> int: ...


@dataclass(slots=True)
class Connections:
    """The limits on the connections of one server, and the connections without a request, longest idle first.

    When there are `limit` and another comes, the longest idle one is dropped: whoever holds connections without
    using them cannot keep others out. Only when all are in use is a new one `beyond` the limit: its request is
    answered if it asks for one of the paths in `probes`, else refused.
    """

    limit: int
    header_seconds: float
    probes: frozenset[bytes] = frozenset()
    access_log: bool = False
    upgrade: Callable[[Any, bytes], bool] | None = None  # continues one as a WebSocket
    memory: RequestMemory | None = None  # takes bodies as they arrive; None: they are not counted
    buffers: int = sys.maxsize  # bytes of all buffers; see `has_buffer`
    buffered: int = 0
    idle: dict[Connection, None] = field(default_factory=dict)
    beyond: dict[Connection, None] = field(default_factory=dict)
    unsent: list[QueuedSender] = field(default_factory=list)

    def send_soon(self, connection: QueuedSender) -> None:
        """Send a connection's chunks when the current callback is over, after those of the others before it.

        A step of the engine brings a token to every stream. Making all events first and then sending all of them
        costs a third to a half less than taking turns: neither half empties the caches of the other, and a reader on
        this machine that is awake does not have to be woken for each event.
        """
        if not self.unsent:
            connection.loop.call_soon(self._send)
        self.unsent.append(connection)

    def _send(self) -> None:
        connections, self.unsent = self.unsent, []
        for connection in connections:
            connection.send_chunks()

    def admit(self, connection: Connection, held: int) -> None:
        """Register one more connection, in addition to `held` others."""
        if held < self.limit or _drop_oldest(self.idle):
            self.idle[connection] = None
            return
        if len(self.beyond) >= SPARE:
            _drop_oldest(self.beyond)
        self.beyond[connection] = None

    def has_room(self, connection: Connection, held: int) -> bool:
        """Whether a connection, one of `held`, may send requests."""
        if connection not in self.beyond:
            return True
        if held - len(self.beyond) >= self.limit:
            return False
        del self.beyond[connection]
        return True

    def has_buffer(self, connection: Connection, size: int) -> bool:
        """Whether a connection may buffer `size` bytes from now on: incomplete headers, and what TLS keeps.

        When all buffers together are over the limit, the longest idle connections above their share are refused.
        """
        self.buffered += size - connection.buffered
        grows, connection.buffered = size > connection.buffered, size
        if self.buffered <= self.buffers or not grows:
            return True
        share = self.buffers // max(1, self.limit)
        for other in [other for other in self.idle if other.buffered > share and other is not connection]:
            other.refuse_buffer()
            if self.buffered <= self.buffers:
                return True
        return False

    def forget(self, connection: Connection) -> None:
        """Unregister a connection that has ended."""
        self.has_buffer(connection, 0)
        self.idle.pop(connection, None)
        self.beyond.pop(connection, None)


def _drop_oldest(connections: dict[Connection, None]) -> bool:
    oldest = next(iter(connections), None)
    if oldest is None:
        return False
    del connections[oldest]
    oldest.drop()
    return True


class Listener:
    """Accepts the connections of a listening socket, one by one.

    asyncio's servers accept every waiting connection before the first of them is reported, up to the length of the
    kernel's queue, and close them all when descriptors run out.
    """

    def __init__(self, sock: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        sock.setblocking(False)
        self._socket, self._accepted = sock, accepted
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._listen()

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # waiting connections keep waiting
                log.error("cannot accept connections: %s", error.strerror or error)
                self._loop.remove_reader(self._socket)
                self._loop.call_later(_PAUSE_SECONDS, self._listen)
                return
            sock.setblocking(False)
            self._accepted(sock)

    def close(self) -> None:
        """Stop accepting."""
        self._closed = True
        self._loop.remove_reader(self._socket)

    async def wait_closed(self) -> None:
        """Does nothing; part of the interface of asyncio's servers."""


def fit_descriptors(connections: int) -> int:
    """Raise the limit on open files to allow this many connections; returns how many there may be.

    Returns fewer, with a log message, when the hard limit does not allow them. Raises TooFewDescriptorsError for none.
    """
    kept = len(os.listdir("/proc/self/fd")) + _OTHER_DESCRIPTORS + SPARE + 2 * _BATCH
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + kept
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY or soft - kept >= connections:
        return connections
    room = soft - kept
    if room < 1:
        raise TooFewDescriptorsError(
            f"this process may open only {soft} files and needs {kept} besides connections; raise the hard limit"
            " (ulimit -Hn)"
        )
    log.warning(
        "--max-connections %d is lowered to %d: this process may open %d files and keeps %d for other uses;"
        " raise the hard limit (ulimit -Hn) to allow more", connections, room, soft, kept,
    )  # fmt: skip
    return room
