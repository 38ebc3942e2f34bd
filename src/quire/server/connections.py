"""One server's connections: taken from the listening socket a few at a time, and counted from that moment."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.server.logs import log
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.server.memory import RequestMemory
    from quire.server.protocol import LimitedProtocol

# Connections beyond the limit: they get a health probe's answer, or hear that there is no room.
SPARE = 16
# Connections taken before the event loop does anything else, so before those that they push out are closed.
_BATCH = 16
# Descriptors for all else: the engine's socket and pipes at a restart, files that are read.
_OTHER_DESCRIPTORS = 64
_PAUSE_SECONDS = 0.1


class TooFewDescriptorsError(QuireError):
    """The process may not open enough files to serve connections."""


@dataclass(slots=True)
class Connections:
    """Limits of one server's connections, and those that have no request in work, longest idle first.

    When there are `limit` and another comes, the longest idle one is dropped: whoever holds connections without
    using them cannot keep others out. Only when all are in use is a new one `beyond` the limit: its request is
    answered if it asks for one of the paths in `probes`, else refused.
    """

    limit: int
    header_seconds: float
    probes: frozenset[bytes] = frozenset()
    access_log: bool = False
    memory: RequestMemory | None = None  # takes bodies as they arrive; None: they are not counted
    buffers: int = sys.maxsize  # bytes of all buffers; see `has_buffer`
    buffered: int = 0
    idle: dict[LimitedProtocol, None] = field(default_factory=dict)
    beyond: dict[LimitedProtocol, None] = field(default_factory=dict)
    unsent: list[LimitedProtocol] = field(default_factory=list)

    def send_soon(self, connection: LimitedProtocol) -> None:
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

    def admit(self, connection: LimitedProtocol, held: int) -> None:
        """Take in one more beside `held` others."""
        if held < self.limit or _drop_oldest(self.idle):
            self.idle[connection] = None
            return
        if len(self.beyond) >= SPARE:
            _drop_oldest(self.beyond)
        self.beyond[connection] = None

    def has_room(self, connection: LimitedProtocol, held: int) -> bool:
        """Whether a connection, one of `held`, may send requests."""
        if connection not in self.beyond:
            return True
        if held - len(self.beyond) >= self.limit:
            return False
        del self.beyond[connection]
        return True

    def has_buffer(self, connection: LimitedProtocol, size: int) -> bool:
        """Whether a connection may buffer so many bytes from now on: headers that are not complete, and what TLS keeps.

        When all together are over the limit, the longest idle ones that buffer more than their share are refused.
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

    def forget(self, connection: LimitedProtocol) -> None:
        """It has ended."""
        self.has_buffer(connection, 0)
        self.idle.pop(connection, None)
        self.beyond.pop(connection, None)


def _drop_oldest(connections: dict[LimitedProtocol, None]) -> bool:
    oldest = next(iter(connections), None)
    if oldest is None:
        return False
    del connections[oldest]
    oldest.drop()
    return True


class Listener:
    """Hands the connections of a listening socket over, one by one.

    asyncio's servers take all that are waiting before the first of them is known to anyone, as many as the kernel's
    queue holds, and close them all when descriptors run out.
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
            except OSError as error:  # those that wait are kept waiting
                log.error("no connection can be accepted: %s", error.strerror or error)
                self._loop.remove_reader(self._socket)
                self._loop.call_later(_PAUSE_SECONDS, self._listen)
                return
            sock.setblocking(False)
            self._accepted(sock)

    def close(self) -> None:
        """Take no more."""
        self._closed = True
        self._loop.remove_reader(self._socket)

    async def wait_closed(self) -> None:
        """As asyncio's servers have it."""


def fit_descriptors(connections: int) -> int:
    """Raise the limit on open files for so many connections; how many there may be.

    Fewer when the hard limit does not allow them, with a line in the log. Raises TooFewDescriptorsError for none.
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
            f"this process may have {soft} open files, and {kept} are needed beside connections: raise the hard limit"
            " (ulimit -Hn)"
        )
    log.warning(
        "--max-connections %d is lowered to %d: this process may have %d open files, and %d are kept for other uses;"
        " raise the hard limit (ulimit -Hn) for more", connections, room, soft, kept,
    )  # fmt: skip
    return room
