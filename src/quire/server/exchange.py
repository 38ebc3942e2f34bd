"""One HTTP request and its response, over ASGI."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from quire.answers import Timings
from quire.records import dataclass
from quire.server import json_input, msgpack_input
from quire.server.errors import OPENAI_ERRORS, ApiError, ClientGoneError, Header
from quire.server.pieces import gathered
from quire.server.request_memory import MAX_RECORDED_BYTES, Held, RequestMemory
from quire.types import SamplingParams

if TYPE_CHECKING:
    from quire.server.served import Served

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")

_working = threading.Lock()
JSON = b"application/json"
# After this process was suspended its timers fire before data that arrived meanwhile is read; wait this long for it.
GRACE_SECONDS = 0.1
MAX_PACKED_BYTES = 2**20
_UNREAD_SECONDS = 0.002  # a write that takes longer waits for its reader
_NO_WEIGHT = re.compile(r"\bq=0(\.0*)?\s*$")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(frozen=True, slots=True)
class Body(Generic[T]):
    """A request body: its size in bytes, and its value."""

    size: int
    value: T


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run work whose time grows with `size` bytes: inline when it is short, else in a thread, one after the other:
    the event loop waits for the interpreter lock behind each thread that runs.
    """

    def alone() -> T:
        with _working:
            return work()

    return work() if size <= json_input.INLINE_BYTES else await asyncio.to_thread(alone)


ChunkPiece = bytes | bytearray  # of a part: copied before anything else runs


class ChunkWriter(Protocol):
    """Sends parts of a response. `paused`: the client does not read, and nothing is queued."""

    @property
    def paused(self) -> bool: ...

    def write_chunk(self, before: ChunkPiece, text: ChunkPiece, after: ChunkPiece, /) -> int:
        """Queue a part given in three pieces; returns its bytes. While the client does not read: 0, and not queued."""


class TextForm(Protocol):
    """What the server's own reader of a streamed response makes of an event that continues a text, in place of the
    event: its next number between `around`, then the text as JSON, and TEXT_END. `around` is None until the reader
    knows it, which it learns from an event in the usual form.
    """

    around: tuple[bytes, bytes] | None
    numbers: Iterator[int]


TEXT_END = bytes(bytearray(b"}"))  # an object of its own: it also tells the form


class Exchange:
    """A request and its response. `arrival` is a time of time.monotonic()."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, memory: RequestMemory) -> None:
        self.arrival = time.monotonic()
        self.turn = self.arrival  # when its latest generation was asked for
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.handler = ""  # the route's pattern, for metrics
        self.errors = OPENAI_ERRORS  # the form of its API
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        # what our HTTP protocol offers beyond ASGI: dropping the connection, whether output is piling up, sending a
        # chunk at once, and whether a part of the body can be read without waiting
        self.abort: Callable[[], None] | None = scope.get("quire.abort")
        self.blocked: Callable[[], bool] = scope.get("quire.blocked", _never)
        self._writer: ChunkWriter | None = scope.get("quire.writer")
        self._arrived: Callable[[], bool] = scope.get("quire.arrived", _never)
        self.text_form: TextForm | None = scope.get("quire.text_form")
        self.scope = scope
        self.request_id = self._request_id()
        # made by the server itself, and already checked: for a socket, or for a line of a batch, in the background
        self.inner: bool = "quire.tenant" in scope
        self.background: bool = scope.get("quire.background", False)
        # identifies the API key when there are several; not the key itself
        self.tenant: str = scope.get("quire.tenant", "")
        self.administrator = False  # an administrator's key opened a route that has it beside a client's
        self.status = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.begun: float = scope.get("quire.begun", self.arrival)  # when the first byte was read
        self.parsed = self.compiled = self.admitted = 0.0  # body, grammar, memory: for explanations
        self.unread = 0.0  # seconds of waiting for the client to read since the last token
        self.asked: list[str] = []  # requests to the engine
        self.received = 0.0  # when the body was complete; a time like `arrival`
        self.details: dict[str, Any] = {}  # for the access log and the span
        self.timings: Timings | None = None  # of the prompt that ended last
        self.served: Served | None = None  # what its requests are for, once that is known
        self.params: SamplingParams | None = None  # of a generation, for the span
        self.finish_reasons: list[str] = []  # of its samples
        self.memory = memory
        self.held: Held = scope.get("quire.held") or Held()  # the memory that this request has taken
        self.limits: Callable[[], list[Header]] | None = None  # makes the headers about limits of its tenant
        self.recorded: list[bytes] | None = None  # what is sent, when it may have to be sent again
        self.recorded_bytes = 0
        self.sent_type = b""
        self._raw: bytes | None = None
        self._receive, self._send = receive, send
        self._extra: list[Header] = []
        self._held: list[bytes] | None = None
        self._held_headers: list[Header] = []

    @property
    def holds_back(self) -> bool:
        """HTTP/1.0 has no chunks: a response of unknown length is held until it is complete."""
        return self.scope.get("http_version") == "1.0"

    def add_headers(self, headers: Sequence[Header]) -> None:
        """Add headers to the response, whatever it will be."""
        self._extra += headers

    def header(self, name: bytes) -> str:
        """A request header's value, "" when absent."""
        return self.headers.get(name, b"").decode("latin-1")

    def _request_id(self) -> str:
        given = self.header(b"x-request-id")
        return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    # ---- request

    async def json(
        self, kind: type[T], limit: int, seconds: float, check: Callable[[set[str], bytes], None]
    ) -> Body[T]:
        """The body as a `kind`, after `check` has seen its names and bytes; large bodies are parsed in a thread.

        Raises ApiError: 408 when the body is late, 413, 415, and the errors of json_input.decode and `check`.
        """
        content_type = self.header(b"content-type").split(";")[0].strip().lower()
        packed = content_type in msgpack_input.NAMES
        if content_type != "application/json" and not packed:
            raise ApiError(
                415, f"content-type: {content_type or 'none'!r} is neither application/json nor application/msgpack",
                code="unsupported_media_type",
            )  # fmt: skip
        if self.header(b"content-encoding").strip().lower() not in {"", "identity"}:
            raise ApiError(
                415,
                "content-encoding: compressed bodies are not accepted",
                code="unsupported_content_encoding",
            )
        raw = await self.body(limit, seconds)
        if packed:
            raw = await self._rewritten(raw, limit)
        await self.memory.take_work(self.held, raw, seconds)

        def parse() -> Body[T]:
            value, names = json_input.decode(raw, kind)
            check(names, raw)
            return Body(len(raw), value)

        self._raw = None  # it can be read once only
        parsed = await off_loop(len(raw), parse)
        self.parsed = time.monotonic()
        return parsed

    async def _rewritten(self, packed: bytes, limit: int) -> bytes:
        """A body of MessagePack as JSON, whose bytes count as those of the body. Raises ApiError."""
        raw = await off_loop(len(packed), lambda: msgpack_input.to_json(packed, limit))
        if len(raw) > len(packed):
            self.memory.take_body(self.held, len(raw) - len(packed))
        return raw

    async def body(self, limit: int, seconds: float) -> bytes:
        """The bytes of the body; can be read once. Raises ApiError 408 or 413."""
        if self._raw is None:
            self._raw = await self._read_body(limit, seconds)
            self.received = time.monotonic()
        return self._raw

    async def _read_body(self, limit: int, seconds: float) -> bytes:
        limit = min(limit, self.memory.largest_body)
        length = self.header(b"content-length")
        if length.isdigit() and int(length) > limit:
            raise self._too_large(limit)
        body = bytearray()  # not a list: a body may arrive byte by byte
        more = True
        while more and self._arrived():  # as a short one has with its head: no time has to be watched
            more = await self._add_part(body, limit)
        if not more:
            return bytes(body)
        loop = asyncio.get_running_loop()
        late: asyncio.TimerHandle | None = None
        try:
            async with asyncio.timeout(None) as deadline:
                late = loop.call_later(seconds, lambda: deadline.reschedule(loop.time() + GRACE_SECONDS))
                while more:
                    more = await self._add_part(body, limit)
        except TimeoutError:
            raise ApiError(
                408, f"the body was not complete after {seconds:g} s", code="request_timeout", close=True
            ) from None
        finally:
            if late is not None:
                late.cancel()
        return bytes(body)

    async def _add_part(self, body: bytearray, limit: int) -> bool:
        """Add what has come; whether there is more to come. Raises ApiError 413."""
        message = await self._body_part()
        body += message.get("body", b"")
        self.bytes_in = len(body)
        if self.bytes_in > limit:
            raise self._too_large(limit)
        return bool(message.get("more_body", False))

    async def _body_part(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        if "quire.refused" in self.scope:  # what arrived is not a body
            raise self.scope["quire.refused"]
        if message["type"] == "http.disconnect":
            raise ClientGoneError("hung up before the body was complete")
        return message

    async def chunks(self, limit: int, seconds: float) -> AsyncIterator[bytes]:
        """The body in pieces, each of which is forgotten when the next one is asked for. Raises ApiError 413, or 408 if
        no piece arrives for `seconds`.
        """
        more = True
        while more:
            try:
                async with asyncio.timeout(seconds):
                    message = await self._body_part()
            except TimeoutError:
                raise ApiError(
                    408,
                    f"no more of the body arrived within {seconds:g} s",
                    code="request_timeout",
                    close=True,
                ) from None
            piece, more = message.get("body", b""), message.get("more_body", False)
            self.bytes_in += len(piece)
            if self.bytes_in > limit:
                raise self._too_large(limit)
            yield piece
            self.memory.give_body(self.held, len(piece))

    @staticmethod
    def _too_large(limit: int) -> ApiError:
        return ApiError(
            413, f"the body is over the limit of {limit} bytes", code="request_too_large", close=True
        )

    # ---- response

    async def respond(
        self, status: int, body: bytes, *, content_type: bytes = JSON, headers: Sequence[Header] = ()
    ) -> None:
        """Send a complete response; one in JSON becomes MessagePack if the client prefers that."""
        if content_type == JSON and self._packs(len(body)):
            whole = body
            body = await off_loop(len(whole), lambda: msgpack_input.from_json(whole))
            content_type = msgpack_input.MSGPACK
        await self.start(status, [(b"content-type", content_type), (b"content-length", str(len(body)).encode()),
                                  *headers])  # fmt: skip
        await self.write(body)
        await self.write(b"", more=False)  # waits until the client has read enough: the rest stays in memory

    async def refuse(self, error: ApiError) -> None:
        """Send a failure as the response, in the form of the API."""
        headers = [*error.headers, (b"connection", b"close")] if error.close else error.headers
        await self.respond(self.errors.status(error), self.errors.body(error), headers=headers)

    async def respond_pieces(self, size: int, make: Callable[[], Iterator[bytes]]) -> None:
        """Send a complete JSON response of about `size` bytes. A long one is made while it is sent, in chunks; for
        HTTP/1.0 it is measured first, so `make` may be called twice.
        """
        if size <= json_input.INLINE_BYTES or self._packs(size):
            await self.respond(200, b"".join(make()))
            return
        headers = [(b"content-type", JSON)]
        if self.holds_back:
            length = await asyncio.to_thread(lambda: sum(map(len, make())))
            headers.append((b"content-length", str(length).encode()))
        await self.start(200, headers)
        rest = gathered(make())
        while piece := await asyncio.to_thread(next, rest, b""):
            await self.write(piece)
        await self.write(b"", more=False)

    def _packs(self, size: int) -> bool:
        """Whether an answer of `size` bytes of JSON is sent in MessagePack: the client accepts that, and the answer is
        short, as all its values are in memory at once.
        """
        accepted = self.header(b"accept")
        if not accepted or size > MAX_PACKED_BYTES:
            return False
        ranges = (part.partition(";") for part in accepted.lower().split(","))
        return any(
            name.strip() in msgpack_input.NAMES and not _NO_WEIGHT.search(weight)
            for name, _, weight in ranges
        )

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        """Send status and headers; adds the request id and the headers of every response."""
        self.status = status
        fixed = [
            (b"x-request-id", self.request_id.encode("latin-1")),
            (b"x-content-type-options", b"nosniff"),
        ]
        if self.errors.id_header is not None:
            fixed.append((self.errors.id_header, self.request_id.encode("latin-1")))
        headers = [*headers, *self._extra, *fixed]
        if self.limits is not None:
            headers += self.limits()
        self.sent_type = dict(headers).get(b"content-type", b"")
        if self.holds_back and all(name != b"content-length" for name, _ in headers):
            self._held, self._held_headers = [], headers
            return
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes, *, more: bool = True) -> Awaitable[None]:
        """Send a part of the body; awaiting it waits while the client does not read."""
        self.bytes_out += len(data)
        if self.timings is not None and (self.blocked() or not more):
            return self._write_last(data, more=more)
        return self._write(data, more=more)

    async def _write_last(self, data: bytes, *, more: bool) -> None:
        """Write after the last token, and count how long the client does not read."""
        began = time.monotonic()
        await self._write(data, more=more)
        if (waited := time.monotonic() - began) >= _UNREAD_SECONDS:
            self.unread += waited

    def _write(self, data: bytes, *, more: bool) -> Awaitable[None]:
        if self.recorded is None and self._held is None:
            return self._send({"type": "http.response.body", "body": data, "more_body": more})
        return self._write_kept(data, more=more)

    def direct_writer(self) -> ChunkWriter | None:
        """A writer that sends parts of the body without waiting; the caller adds their size to `bytes_out`. None unless
        the response has started, is sent in chunks, and is not recorded.
        """
        return self._writer if self.status and self.recorded is None and self._held is None else None

    async def _write_kept(self, data: bytes, *, more: bool) -> None:
        if self.recorded is not None:
            self.recorded_bytes += len(data)
            if self.recorded_bytes > MAX_RECORDED_BYTES:
                self.recorded.clear()
            else:
                self.recorded.append(data)
        if self._held is not None:
            self._held.append(data)
            if more:
                return
            data = b"".join(self._held)
            headers = [*self._held_headers, (b"content-length", str(len(data)).encode())]
            await self._send({"type": "http.response.start", "status": self.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def detached(self) -> Exchange:
        """One of the same request and tenant that nobody waits for; it takes over the memory of the request."""

        async def receive() -> MutableMapping[str, Any]:
            await asyncio.get_running_loop().create_future()  # nobody hangs up
            return {}

        async def send(_: MutableMapping[str, Any]) -> None:
            """Nobody reads."""

        scope = {name: value for name, value in self.scope.items() if not name.startswith("quire.")}
        made = Exchange(scope, receive, send, self.memory)
        made.tenant, made.request_id, made.handler = self.tenant, self.request_id, self.handler
        made.held, self.held, made.served = self.held, Held(), self.served
        return made

    def watch(self) -> HangUpWatch:
        """A context in which a hang-up cancels the work of the current task; enter it after the body was read."""
        return HangUpWatch(self, self._receive)


def _never() -> bool:
    return False


class HangUpWatch:
    """Cancels the task inside when the client hangs up or `end` is called; raises ClientGoneError on exit.

    Without it generation would go on for a client that has left: sending after a hang-up raises nothing.
    """

    def __init__(self, exchange: Exchange, receive: Receive) -> None:
        self.exchange = exchange
        self._receive = receive
        self._reason = ""
        self._blocked = 0.0
        self._sent = 0  # bytes_out at the last call of `waiting`
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HangUpWatch:
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._wait())
        return self

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end("hung up")

    def end(self, reason: str) -> None:
        """Stop the work inside the context for `reason`."""
        if self._task is not None and not self._reason:
            self._reason = reason
            self._task.cancel()

    def waiting(self, passed: float) -> float:
        """Seconds that output has been piling up without any of it being read, as of this call, `passed` seconds after
        the previous one.
        """
        taken, self._sent = self.exchange.bytes_out > self._sent, self.exchange.bytes_out
        self._blocked = self._blocked + passed if self.exchange.blocked() and not taken else 0.0
        return self._blocked

    def end_slow_reader(self) -> None:
        """Stop the work, drop the connection and discard its buffered output."""
        self.end("did not read")
        if self.exchange.abort is not None:
            self.exchange.abort()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watcher is not None
        self._watcher.cancel()
        task, self._task = self._task, None
        if self._reason and kind is not None and issubclass(kind, asyncio.CancelledError):
            assert task is not None
            if task.uncancel() == 0:
                raise ClientGoneError(self._reason) from None
