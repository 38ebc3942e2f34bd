"""An answer on its way from a server to a client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import cast

from quire.router.passing_connection import PassingConnection, framed, is_one_chunk, payload_of
from quire.router.resuming import EVENT_ENDS, complete_events
from quire.routing.continued import STREAM, OutputIds
from quire.routing.settled_weights import VERSION
from quire.routing.tickets import TICKET
from quire.server.exchange import ChunkWriter, Exchange
from quire.server.fleet.shadows import SeenAnswer
from quire.server.queued_writes import QueuedWrites
from quire.util.http_client import ClientConnection, ClientError

WHOLE_BYTES = 2**20  # an answer of a known length up to this is sent when it is complete
_AHEAD_BYTES = 256 * 1024  # of a stream, kept while its client does not read
_ENDS = 4096  # bytes at the beginning, and of each of the last parts, that are looked at
_LAST = 16  # parts
_EVENT_BYTES = 16 * 2**20  # of a stream, until an event is complete
_KEPT_AT_ONCE = 4096  # bytes of a stream for which memory is taken at least
_CHUNK_ENDS = tuple(end + b"\r\n" for end in EVENT_ENDS)  # of chunks that end with an event
_HOP = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "content-length", "date", "server", "x-request-id", "request-id", "x-content-type-options",
    TICKET, STREAM,
))  # fmt: skip


class FromServer:
    """What is read from a server by a connection; with `came`, when the last part of it came."""

    def __init__(self) -> None:
        self._connection: ClientConnection | None = None
        self._paused = False
        self.came = time.perf_counter()

    def take(self, connection: ClientConnection) -> None:
        """Take the connection from which the answer will come."""
        self._connection = connection

    def give_up(self, seconds: float) -> None:
        """Its server is silent: fail the request if nothing has come for so long."""
        late = time.perf_counter() - self.came >= seconds
        if late and self._connection is not None and not self._paused:
            self._connection.give_up("nothing came for long, and the server does not answer")

    def _pause(self) -> None:
        if self._connection is not None:
            self._paused = True
            self._connection.pause()

    def _resume(self) -> None:
        if self._paused and self._connection is not None:
            self._paused, self.came = False, time.perf_counter()
            self._connection.resume()


class Relay(FromServer):
    """Receives an answer. In `stream` its parts are sent as they come; while the client does not read, the server is
    not read either.
    """

    def __init__(self, exchange: Exchange, keep: Callable[[int], bool] | None = None) -> None:
        """`keep` takes memory for what is sent of a stream, so that another server can go on with it. `mark`: what the
        server has said stands for its output, whose `ids` come in comments; "" if they do not."""
        super().__init__()
        self._exchange, self._keep = exchange, keep
        self.seen: SeenAnswer | None = None  # the answer, if it is compared with that of another model
        self.sent: list[bytes] = []  # whole chunks
        self.sent_bytes = self._room = 0  # taken for what is kept, and not used of that
        self.mark, self.ids = "", OutputIds()
        self._part = b""  # of an event that is not complete
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_stream = False  # it consists of server-sent events
        self.is_whole = False  # it is short enough to be sent when it is complete
        self.beginning = b""
        self._last: deque[bytes] = deque(maxlen=_LAST)
        self._kept: list[bytes] = []
        self._size = 0
        self._writer: ChunkWriter | None = None
        # Something has come, or the request has ended: what waits for it goes on in the same turn of the loop. A task
        # for each thing to wait for would take three, each as long as all other streams keep it busy.
        self._news: asyncio.Future[None] | None = None
        self._is_late = False  # it has not begun in time

    # ---- the connection's side

    def start(self, status: int, headers: dict[str, str]) -> None:
        """Take status and headers."""
        self.status, self.headers = status, dict(headers)
        self.is_stream = headers.get("content-type", "").startswith("text/event-stream")
        self.mark = headers.get(STREAM, "") if status == 200 and self.is_stream else ""
        length = headers.get("content-length", "")
        whole = length.isdigit() and int(length) <= WHOLE_BYTES
        self.is_whole = whole and not (self.is_stream and status == 200)
        self._tell()

    def data(self, chunk: bytes, at: float) -> None:
        """Take a part, and send it if that is possible."""
        self.came = at
        if self.seen is not None:
            self.seen.takes(chunk)
        if not self.beginning:
            self.beginning = chunk[:_ENDS]
        if not self.is_stream:
            self._last.append(chunk[-_ENDS:])
        elif not (chunk := self._whole_events(chunk)):
            return
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
        self._tell()
        if self._size > _AHEAD_BYTES:
            self._pause()

    def _pass(self, writer: QueuedWrites, data: bytes) -> bool:
        """Send what has come as it came, if it is whole chunks with complete events that nobody has to look at."""
        if self._part or self._kept or writer.paused or not (self.beginning and data.endswith(_CHUNK_ENDS)):
            return False
        if not is_one_chunk(data) and payload_of(data) is None:
            return False
        self.came = time.perf_counter()
        if len(data) <= self._room:
            self._room -= len(data)
            self.sent.append(data)
        else:
            self._add(data)
        self._exchange.bytes_out += len(data)
        writer.send_later(data)
        return True

    def _whole_events(self, chunk: bytes) -> bytes:
        """What may be sent: complete events, so that an error can follow whatever comes, which are kept as long as
        there is memory. Raises ClientError for one that is too long."""
        if self._part or not chunk.endswith(EVENT_ENDS):
            chunk, self._part = complete_events(self._part + chunk)
            if len(self._part) > _EVENT_BYTES:
                raise ClientError("bad answer: an event without end")
        if self.mark and chunk:
            known = self.ids.size
            chunk = (self.ids if self.is_kept else OutputIds()).take(chunk)
            self._count(self.ids.size - known)
        if chunk:
            self.add(chunk)
        return chunk

    def add(self, data: bytes) -> None:
        """Keep what is sent, if there is memory for it."""
        self._add(framed(data))

    def _add(self, chunks: bytes) -> None:
        self._count(len(chunks))
        if self.is_kept:
            self.sent.append(chunks)
        else:
            self._last.append(_end_of(chunks))

    def _count(self, size: int) -> None:
        """Take memory for so many bytes more that are kept beside; without it nothing is."""
        if self._keep is None:
            return
        self._room -= size
        if self._room < 0:
            more = max(_KEPT_AT_ONCE, -self._room)
            if self._keep(more):
                self.sent_bytes += more
                self._room += more
            else:
                self.forget()

    def follows(self, mark: str, ids: OutputIds, more: int) -> None:
        """Another server goes on, which names all ids of the output, of which so many bytes are new."""
        self._count(more)
        if self.is_kept:
            self.mark, self.ids = mark, ids

    def forget(self) -> None:
        """Give back the memory of what was sent; nobody can go on with this stream any more."""
        self._last.extend(map(_end_of, self.sent[-_LAST:]))
        if self._keep is not None:
            self._keep(-self.sent_bytes)
        self._keep, self.sent, self.sent_bytes, self._room, self.ids = None, [], 0, 0, OutputIds()

    @property
    def is_kept(self) -> bool:
        """Whether `sent` is all that was sent."""
        return self._keep is not None

    # ---- the request's side

    @property
    def end(self) -> bytes:
        """The last parts of what has come, complete events if they are kept."""
        return b"".join([*self._last, *map(_end_of, self.sent[-_LAST:])])

    @property
    def delivered(self) -> bytes:
        """What was sent, if that is kept."""
        return payload_of(b"".join(self.sent)) or b""

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

    def follow(self, request: asyncio.Task[None]) -> None:
        """The answer is that of `request`."""
        request.add_done_callback(self._tell)

    def _tell(self, _: asyncio.Task[None] | None = None) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _late(self) -> None:
        self._is_late = True
        self._tell()

    async def _wait(self) -> None:
        """Until something has come, or the request has ended."""
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    async def begins(self, request: asyncio.Task[None], seconds: float) -> bool:
        """Wait until the answer begins; false if `request`, which is followed, ends before. Raises TimeoutError."""
        # A third of what asyncio.timeout costs.
        timer = asyncio.get_running_loop().call_later(seconds, self._late)
        try:
            while not (self.status or request.done()):
                if self._is_late:
                    raise TimeoutError
                await self._wait()
        finally:
            timer.cancel()
        return self.status > 0

    async def stream(self, request: asyncio.Task[None]) -> None:
        """Send the answer, whose response has started, until `request`, which is followed, ends. Raises ClientError if
        it is cut off."""
        self._writer = self._exchange.direct_writer()
        connection, writer = self._connection, cast(object, self._writer)
        looked_at = self.mark or self.seen is not None or not self.is_stream
        if isinstance(connection, PassingConnection) and isinstance(writer, QueuedWrites) and not looked_at:
            connection.passes = partial(self._pass, writer)
        while self._kept or not request.done():
            if self._kept:
                await self._send_kept()
            else:
                await self._wait()
        request.result()
        if self._part:  # its last event has no end
            await self._exchange.write(self._part)

    async def _send_kept(self) -> None:
        while self._kept:
            kept, self._kept, self._size = self.body, [], 0
            await self._exchange.write(kept)  # waits while the client does not read
        self._resume()


def _end_of(chunks: bytes) -> bytes:
    """The end of what whole chunks contain."""
    return (payload_of(chunks) or b"")[-_ENDS:]


class StreamPieces(FromServer):
    """Receives the stream of a server that goes on with another one's, piece by piece. `mark`: see Relay; `status`: 0
    before there is one; `version`: of its weights, "" if that is not said."""

    def __init__(self) -> None:
        super().__init__()
        self.status, self.mark, self.version = 0, "", ""
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._size = 0

    def start(self, status: int, headers: dict[str, str]) -> None:
        """Take status and headers. Raises ClientError unless they begin a stream."""
        self.status = status
        if status != 200 or not headers.get("content-type", "").startswith("text/event-stream"):
            raise ClientError(f"bad answer: HTTP {status}, not a stream")
        self.mark, self.version = headers.get(STREAM, ""), headers.get(VERSION, "")

    def data(self, chunk: bytes, at: float) -> None:
        """Take a part of the stream."""
        self.came = at
        self._pieces.put_nowait(chunk)
        self._size += len(chunk)
        if self._size > _AHEAD_BYTES:
            self._pause()

    async def pieces(self, request: asyncio.Task[None]) -> AsyncIterator[bytes]:
        """The parts of the stream until `request` ends. Raises ClientError if it fails."""
        while not request.done() or not self._pieces.empty():
            waiting = asyncio.create_task(self._pieces.get())
            try:
                await asyncio.wait((request, waiting), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()  # also if nobody waits for more
            if not waiting.done():
                continue
            piece = waiting.result()
            self._size -= len(piece)
            yield piece
            if self._size <= _AHEAD_BYTES:
                self._resume()
        request.result()
