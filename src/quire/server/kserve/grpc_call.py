"""One call over gRPC, as its PROTOCOL-HTTP2.md (github.com/grpc/grpc) has it: messages in, messages out, a status."""

from __future__ import annotations

import asyncio
import enum
import re
import struct
from typing import Any, Protocol
from urllib.parse import quote

from h2.errors import ErrorCodes
from h2.exceptions import H2Error

from quire.records import dataclass
from quire.server.errors import ApiError, ClientGoneError

_PREFIX = struct.Struct(">BI")  # whether a message is compressed, and its length
# A frame of data without flags, and the prefix of the message in it: RFC 9113, sections 4.1 and 6.1.
_FRAME = struct.Struct(">BHBBIBI")
_PREFIX_BYTES = 5
_LEAST_FRAME = 16384  # what any peer takes in a frame
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_HEADERS = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-accept-encoding", "identity")]


class GrpcStatus(enum.IntEnum):
    """How a call ended: gRPC's codes, those that are used here."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Limits of a connection. `calls`: at a time; `message`: bytes; the others: seconds."""

    calls: int
    message: int
    header_timeout: float
    idle_timeout: float


class CallConnection(Protocol):
    """What a call needs of its connection; see GrpcConnection. `h2`: an H2Connection."""

    loop: asyncio.AbstractEventLoop
    limits: GrpcLimits
    h2: Any
    paused: bool

    def send_later(self, chunk: bytes, /) -> None: ...

    def flush(self) -> None: ...

    def forget(self, call: GrpcCall, /) -> None: ...

    async def moved(self) -> None: ...


class GrpcCall:
    """A call. `stream` is its number on the connection, `method` its path, `metadata` the other headers.

    What every token touches is in slots: caches are cold when the tokens of a step arrive.
    """

    __slots__ = (
        "_arrived", "_begun", "_buffer", "_connection", "_deadline", "_ended", "_frames", "_gone", "_ready", "_timer",
        "_unread", "ending", "metadata", "method", "refusal", "stream", "task",
    )  # fmt: skip

    def __init__(self, connection: CallConnection, stream: int, headers: Any) -> None:
        self.stream = stream
        self.task: asyncio.Task[None] | None = None  # answers it
        self.ending: tuple[GrpcStatus, str] = GrpcStatus.CANCELLED, "the client has hung up"
        self._connection = connection
        self._frames = connection.h2.streams[stream]  # how h2 knows it
        named: dict[bytes, bytes] = dict(headers)
        self.method = named.get(b":path", b"").decode("latin-1")
        self.metadata = [(bytes(name), bytes(value)) for name, value in headers if name[:1] != b":"]
        self.refusal = _refusal(named)
        self._buffer = bytearray()
        self._unread = 0  # bytes whose place the client does not have back
        self._arrived: asyncio.Future[None] | None = None  # what a reader waits for
        self._ended = self._begun = self._gone = False
        self._ready = False  # messages can be sent at once: it has begun, and none is being sent
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if (found := _TIMEOUT.fullmatch(named.get(b"grpc-timeout", b""))) is not None:
            seconds = int(found[1]) * _UNITS[found[2]]
            self._deadline = connection.loop.time() + seconds
            self._timer = connection.loop.call_at(self._deadline, self._expire)

    def time_remaining(self) -> float | None:
        """Seconds to the deadline; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - self._connection.loop.time())

    # ---- reading

    async def read(self) -> bytes | None:
        """The next message; None after the last. The client may send more than a window of it only from now on. Raises
        ApiError for a message that is compressed, too large or incomplete.
        """
        loop = self._connection.loop
        while (message := self._next()) is None:
            if self._ended:
                if self._buffer:
                    raise ApiError(400, "the message is incomplete", code="invalid_message")
                return None
            self._arrived = loop.create_future()
            self._release()
            try:
                await self._arrived
            finally:
                self._arrived = None
        return message

    def _next(self) -> bytes | None:
        buffer = self._buffer
        if len(buffer) < _PREFIX_BYTES:
            return None
        compressed, size = _PREFIX.unpack_from(buffer)
        if compressed:
            raise ApiError(501, "compressed messages are not supported", code="unsupported_encoding")
        most = self._connection.limits.message
        if size > most:
            raise ApiError(
                413, f"a message of {size} bytes is larger than {most}, the limit", code="request_too_large"
            )
        end = _PREFIX_BYTES + size
        if len(buffer) < end:
            return None
        message = bytes(buffer[_PREFIX_BYTES:end])
        del buffer[:end]
        return message

    def feed(self, data: bytes, size: int) -> None:
        """Data has come, which took `size` bytes of the windows."""
        self._buffer += data
        self._unread += size
        if (waiting := self._arrived) is not None:
            head = self._buffer[:_PREFIX_BYTES]
            size = _PREFIX.unpack(head)[1] if len(head) == _PREFIX_BYTES else 0
            if size <= self._connection.limits.message and len(self._buffer) < _PREFIX_BYTES + size:
                self._release()
            elif not waiting.done():
                waiting.set_result(None)

    def feed_end(self) -> None:
        """No message follows."""
        self._ended = True
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _release(self) -> None:
        """Let the client send as much as has come since the last time."""
        unread, self._unread = self._unread, 0
        if unread and not self._gone:
            self._connection.h2.acknowledge_received_data(unread, self.stream)
            self._connection.flush()

    # ---- writing

    def room(self) -> int:
        """Bytes of a message that can be sent at once."""
        return self._room() - _PREFIX_BYTES if self._ready else 0

    def _room(self) -> int:
        if self._connection.paused or self._gone:
            return 0
        h2 = self._connection.h2
        ours, all_calls = self._frames.outbound_flow_control_window, h2.outbound_flow_control_window
        return min(int(ours), int(all_calls), int(h2.max_outbound_frame_size))

    def write_now(self, message: bytes) -> bool:
        """Send a message; false, without sending, if there is no room for it."""
        connection, frames, size = self._connection, self._frames, len(message)
        h2, whole = connection.h2, size + _PREFIX_BYTES
        left, room = h2.outbound_flow_control_window - whole, frames.outbound_flow_control_window - whole
        if not self._ready or connection.paused or left < 0 or room < 0 or whole > _LEAST_FRAME:
            return False
        h2.outbound_flow_control_window, frames.outbound_flow_control_window = left, room
        connection.send_later(_FRAME.pack(whole >> 16, whole & 0xFFFF, 0, 0, self.stream, 0, size) + message)
        return True

    async def write(self, message: bytes) -> None:
        """Send a message, in pieces as the client reads; one at a time. Raises ClientGoneError."""
        connection, sent = self._connection, 0
        data = _PREFIX.pack(0, len(message)) + message
        self._ready = False
        try:
            if not self._begun:
                self._begun = True
                connection.h2.send_headers(self.stream, _HEADERS)
            while sent < len(data):
                if (room := self._room()) <= 0:
                    await connection.moved()
                if self._gone:
                    raise ClientGoneError("hung up")
                if room > 0:
                    connection.h2.send_data(self.stream, data[sent : sent + room])
                    sent += room
                connection.flush()
            self._ready = True
        except H2Error:
            raise ClientGoneError("hung up") from None

    # ---- the end

    def cancel(self, status: GrpcStatus, message: str) -> None:
        """Stop answering, and say why."""
        self.ending = status, message
        if self.task is not None:
            self.task.cancel()

    def leave(self) -> None:
        """Stop answering: the client has left."""
        self._gone, self._ready = True, False
        if self.task is not None:
            self.task.cancel()

    def _expire(self) -> None:
        self.cancel(GrpcStatus.DEADLINE_EXCEEDED, "the deadline of the call has passed")

    def finish(self) -> None:
        """Say how the call ended, unless the client has left."""
        connection, (status, message) = self._connection, self.ending
        if self._timer is not None:
            self._timer.cancel()
        try:
            if not self._gone:
                trailers = [("grpc-status", str(int(status)))]
                if message:
                    trailers.append(
                        ("grpc-message", quote(message, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"))
                    )
                if not self._begun:
                    trailers = [*_HEADERS, *trailers]
                connection.h2.send_headers(self.stream, trailers, end_stream=True)
                if not self._ended:
                    connection.h2.reset_stream(self.stream, ErrorCodes.NO_ERROR)
            if self._unread:
                connection.h2.acknowledge_received_data(self._unread, self.stream)
        except H2Error:  # the connection or the stream has ended meanwhile
            pass
        self._gone, self._ready = True, False
        connection.flush()
        connection.forget(self)


def _refusal(headers: dict[bytes, bytes]) -> tuple[GrpcStatus, str] | None:
    """Why a request is no call that is understood here."""
    if headers.get(b":method") != b"POST":
        return GrpcStatus.UNIMPLEMENTED, "a call is a POST request"
    kind = headers.get(b"content-type", b"")
    if kind.partition(b";")[0].strip() not in {b"application/grpc", b"application/grpc+proto"}:
        return GrpcStatus.UNIMPLEMENTED, "content-type is not application/grpc"
    return None
