"""A gRPC server beside the HTTP server. Needs the packages `h2` and `protobuf`, the extra `grpc`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError

from quire import __version__
from quire.engine.api import EngineState
from quire.engine.host.held import GRPC_CALLS, grpc_connections
from quire.server.access import AccessControl
from quire.server.connections import Connections, Listener
from quire.server.context import ServerContext
from quire.server.errors import ApiError, ClientGoneError, api_error, bad_request, shorten
from quire.server.exchange import ChunkPiece, Exchange
from quire.server.inner_request import Application, stream_inner
from quire.server.kserve.grpc_call import GrpcCall, GrpcLimits, GrpcStatus
from quire.server.kserve.grpc_connection import GrpcConnection
from quire.server.kserve.kserve_inference import (
    INPUTS,
    OUTPUTS,
    InferenceAnswer,
    InferenceAsk,
    Message,
    inner_error,
    read_ask,
)
from quire.server.kserve.kserve_messages import CLASSES, SERVICE
from quire.server.logs import log, log_access
from quire.types import QuireError

MAX_MESSAGE_BYTES = 256 * 1024
# Inferences of one ModelStreamInfer at a time; the next message is read when there are fewer.
MAX_RUNNING = 16
_PATH = "/v1/completions"
_OPEN = frozenset({"ServerLive", "ServerReady"})
_CODES = {
    400: GrpcStatus.INVALID_ARGUMENT, 401: GrpcStatus.UNAUTHENTICATED, 403: GrpcStatus.PERMISSION_DENIED,
    404: GrpcStatus.NOT_FOUND, 408: GrpcStatus.DEADLINE_EXCEEDED, 413: GrpcStatus.RESOURCE_EXHAUSTED,
    429: GrpcStatus.RESOURCE_EXHAUSTED, 501: GrpcStatus.UNIMPLEMENTED, 503: GrpcStatus.UNAVAILABLE,
    504: GrpcStatus.DEADLINE_EXCEEDED,
}  # fmt: skip
_CLOSE_SECONDS = 5.0  # for the peer to close its side of a TLS connection
Send = Callable[[Message], Awaitable[None]]


class GrpcServer:
    """Serves KServe's protocol in the running event loop. Inferences are requests that the server makes of itself, with
    the key of the call: validation, limits, memory and metrics are those of HTTP.
    """

    def __init__(
        self, context: ServerContext, application: Application, tls: ssl.SSLContext | None = None
    ) -> None:
        config = context.config
        self._config, self._tls = config, tls
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        self._limits = GrpcLimits(
            GRPC_CALLS, MAX_MESSAGE_BYTES, config.header_timeout, config.keep_alive_timeout
        )
        self._most = grpc_connections(config)
        self._line = Connections(self._most, config.header_timeout)  # sends what calls have queued
        self._calls = _Calls(context, application)
        self._open: dict[GrpcConnection, None] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self.port = 0

    def start(self, sock: socket.socket) -> None:
        """Accept connections from a listening socket."""
        self.port = sock.getsockname()[1]
        self._listener = Listener(sock, self._accept)
        log.info("gRPC: listening on %s, port %d", self._config.host, self.port)

    def reload(self) -> None:
        """Read the TLS files again for the next connection. Raises OSError and ssl.SSLError."""
        if self._tls is not None and self._config.ssl_certfile is not None:
            self._tls.load_cert_chain(self._config.ssl_certfile, self._config.ssl_keyfile)

    async def stop(self) -> None:
        """End all calls and close the port."""
        if self._listener is not None:
            self._listener.close()
        running = [task for connection in self._open for task in connection.stop()]
        if running:
            await asyncio.wait(running)
        for connection in list(self._open):
            connection.end()

    def _accept(self, sock: socket.socket) -> None:
        if len(self._open) >= self._most:
            idle = next((connection for connection in self._open if connection.idle), None)
            if idle is None:
                sock.close()
                return
            idle.end()  # its client connects again for the next call
        connection = GrpcConnection(self._line, self._limits, self._calls.answer, self._open)
        task = asyncio.create_task(self._connect(connection, sock))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, connection: GrpcConnection, sock: socket.socket) -> None:
        loop, seconds = asyncio.get_running_loop(), self._config.header_timeout
        try:
            if self._tls is None:
                await loop.connect_accepted_socket(lambda: connection, sock)
            else:
                await loop.connect_accepted_socket(
                    lambda: connection, sock, ssl=self._tls, ssl_handshake_timeout=seconds,
                    ssl_shutdown_timeout=_CLOSE_SECONDS,
                )  # fmt: skip
        except (OSError, RuntimeError):  # no handshake, or the peer has left
            self._open.pop(connection, None)


class _CallWriter:
    """Sends the messages of a call, one after the other as gRPC wants them."""

    def __init__(self, exchange: Exchange, call: GrpcCall, seconds: float) -> None:
        self._exchange, self._call, self._seconds = exchange, call, seconds
        self._turn = asyncio.Lock()

    async def send(self, data: bytes) -> None:
        """Send a message. Raises ClientGoneError for a client that does not read."""
        async with self._turn:
            self._exchange.bytes_out += len(data)
            try:
                async with asyncio.timeout(self._seconds):
                    await self._call.write(data)
            except TimeoutError:
                self._exchange.details["ended"] = "did not read"
                raise ClientGoneError("did not read") from None


class _StreamWriter:
    """Takes the events of a streamed completion while the client reads: they become messages as they come."""

    __slots__ = ("_answer", "_call", "sent")

    def __init__(self, call: GrpcCall, answer: InferenceAnswer) -> None:
        self._call, self._answer = call, answer
        self.sent = 0  # bytes

    @property
    def paused(self) -> bool:
        """Whether the client does not read."""
        return self._call.room() <= 0

    def write_chunk(self, before: ChunkPiece, text: ChunkPiece, after: ChunkPiece) -> int:
        """See ChunkWriter."""
        message = self._answer.continued(before, text, after)
        if message is not None:
            if not self._call.write_now(message):
                return 0
            self.sent += len(message)
            return len(before) + len(text) + len(after)
        events = b"".join((before, text, after))
        if self._call.room() < self._answer.most_bytes(events):
            return 0
        for response in self._answer.feed(events):
            message = _streamed(response)
            self._call.write_now(message)
            self.sent += len(message)
        return len(events)


def _streamed(response: Message) -> bytes:
    data: bytes = CLASSES["ModelStreamInferResponse"](infer_response=response).SerializeToString()
    return data


class _Calls:
    """The calls of the service. Each reads its message itself, once the caller's key is known and there is memory."""

    def __init__(self, context: ServerContext, application: Application) -> None:
        self._context, self._application = context, application
        self._access = AccessControl(context.config, context.tenants)
        self._answers: dict[str, Callable[[Message], Message]] = {
            "ServerLive": lambda _: CLASSES["ServerLiveResponse"](live=True),
            "ServerReady": lambda _: CLASSES["ServerReadyResponse"](ready=self._ready()),
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda _: CLASSES["ServerMetadataResponse"](name="quire", version=__version__),
            "ModelMetadata": self._model_metadata,
        }
        self._names = frozenset({*self._answers, "ModelInfer", "ModelStreamInfer"})

    async def answer(self, call: GrpcCall) -> tuple[GrpcStatus, str]:
        """Answer a call; how it ended."""
        service, _, name = call.method.removeprefix("/").partition("/")
        if service != SERVICE or name not in self._names:
            return GrpcStatus.UNIMPLEMENTED, shorten(f"{call.method} is not implemented")
        return await self._handle(name, call)

    async def _handle(self, name: str, call: GrpcCall) -> tuple[GrpcStatus, str]:
        exchange, config = self._exchange(name, call), self._context.config
        try:
            await self._serve(name, exchange, call)
            exchange.status = 200
            return GrpcStatus.OK, ""
        except ClientGoneError as gone:
            return GrpcStatus.CANCELLED, gone.reason
        except (ApiError, QuireError) as error:
            found = api_error(error)
            exchange.status, exchange.details["error"] = found.status, found.code
            return _CODES.get(found.status, GrpcStatus.INTERNAL), shorten(str(found))
        finally:
            exchange.held.close()
            self._context.metrics.count_http(exchange)
            if config.access_log:
                log_access(exchange)

    async def _serve(self, name: str, exchange: Exchange, call: GrpcCall) -> None:
        if name not in _OPEN:
            self._access.check_key(exchange)
        memory = self._context.memory
        memory.take_head(exchange.held, 2 * MAX_MESSAGE_BYTES, len(exchange.scope["headers"]))
        if name == "ModelStreamInfer":
            await self._serve_stream(exchange, call)
            return
        seconds, request = self._context.config.body_timeout, None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                request = await self._read(name, exchange, call)
        if request is None:
            raise bad_request(None, f"no message arrived within {seconds:g} s", "missing_message")
        exchange.held.close()  # what an inference holds is charged to the request inside
        if name == "ModelInfer":
            await self._infer(exchange, call, request)
        else:
            await self._writer(exchange, call).send(self._answers[name](request).SerializeToString())

    def _exchange(self, name: str, call: GrpcCall) -> Exchange:
        """The metadata of a call as headers."""

        async def never(*_: Any) -> Any:
            raise AssertionError("a call is not HTTP")

        scope = {
            "type": "http", "method": "POST", "path": f"/{SERVICE}/{name}", "query_string": b"",
            "http_version": "2", "client": None, "headers": call.metadata,
        }  # fmt: skip
        made = Exchange(scope, never, never, self._context.memory)
        made.handler = made.path
        return made

    async def _read(self, name: str, exchange: Exchange, call: GrpcCall) -> Message | None:
        """The next message; None at the end of the client's. Raises ApiError."""
        data = await call.read()
        if data is None:
            return None
        exchange.bytes_in += len(data)
        kind = "ModelInferRequest" if name == "ModelStreamInfer" else f"{name}Request"
        try:
            return CLASSES[kind].FromString(data)
        except DecodeError:
            raise bad_request(None, f"the message is not a {kind}", "invalid_message") from None

    # ---- the server and its model

    def _ready(self) -> bool:
        return self._context.state is EngineState.READY

    def _model_ready(self, request: Message) -> Message:
        self._context.model(request.name)
        return CLASSES["ModelReadyResponse"](ready=self._ready())

    def _model_metadata(self, request: Message) -> Message:
        self._context.check_ready()
        made = CLASSES["ModelMetadataResponse"](
            name=self._context.model(request.name or None), versions=["1"], platform="quire"
        )
        for tensors, known in ((made.inputs, INPUTS), (made.outputs, OUTPUTS)):
            for name, datatype in known.items():
                several = known is OUTPUTS and datatype == "BYTES"
                tensors.add(name=name, datatype=datatype, shape=[-1 if several else 1])
        return made

    # ---- inference

    async def _infer(self, exchange: Exchange, call: GrpcCall, request: Message) -> None:
        ask = read_ask(request, streams=False, deadline=call.time_remaining())
        writer = self._writer(exchange, call)

        async def send(response: Message) -> None:
            await writer.send(response.SerializeToString())

        await self._run(ask, exchange, call, send)

    async def _serve_stream(self, exchange: Exchange, call: GrpcCall) -> None:
        """Answer each message of the client, several at a time. What is wrong with one does not end the others."""
        running: set[asyncio.Task[None]] = set()
        writer = self._writer(exchange, call)
        ended: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                while (request := await self._next(exchange, call, running)) is not None:
                    task = group.create_task(self._answer(exchange, call, request, writer))
                    running.add(task)
                    task.add_done_callback(running.discard)
                    if len(running) >= MAX_RUNNING:
                        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        except* (ApiError, ClientGoneError) as several:
            ended = several.exceptions[0]
        if ended is not None:
            raise ended

    async def _next(
        self, exchange: Exchange, call: GrpcCall, running: set[asyncio.Task[None]]
    ) -> Message | None:
        """The next message of a stream, which may take its time while others are answered."""
        seconds = self._context.config.websocket_idle_timeout
        reading = asyncio.create_task(self._read("ModelStreamInfer", exchange, call))
        try:
            while not (await asyncio.wait({reading}, timeout=seconds))[0]:
                if not running:
                    raise ApiError(408, f"no message has come for {seconds:g} s", code="request_timeout")
            return reading.result()
        finally:
            reading.cancel()

    def _writer(self, exchange: Exchange, call: GrpcCall) -> _CallWriter:
        return _CallWriter(exchange, call, self._context.config.reader_timeout)

    async def _answer(
        self, exchange: Exchange, call: GrpcCall, request: Message, writer: _CallWriter
    ) -> None:

        async def send(response: Message) -> None:
            await writer.send(_streamed(response))

        try:
            ask = read_ask(request, streams=True, deadline=call.time_remaining())
            await self._run(ask, exchange, call, send)
        except (ApiError, QuireError) as error:
            failed = CLASSES["ModelStreamInferResponse"](error_message=shorten(str(api_error(error))))
            failed.infer_response.id = request.id
            await writer.send(failed.SerializeToString())

    async def _run(self, ask: InferenceAsk, exchange: Exchange, call: GrpcCall, send: Send) -> None:
        """Make a request of the ask, and send what it answers; texts of a stream go past `send`. Raises ApiError and
        ClientGoneError.
        """
        answer = InferenceAnswer(ask, self._context.model(ask.model or None, exchange))
        refusal, code = bytearray(), 200

        async def take(status: int, data: bytes) -> None:
            nonlocal code
            if status == 200:
                for response in answer.feed(data):
                    await send(response)
            else:
                code = status
                refusal.extend(data)

        writer = _StreamWriter(call, answer) if ask.stream else None
        await stream_inner(
            self._application, self._context.memory, _PATH, ask.body, exchange.tenant, take, writer
        )
        exchange.bytes_out += 0 if writer is None else writer.sent
        if (
            left := exchange.details.get("ended")
        ) is not None:  # the request inside ends where it could not be sent
            raise ClientGoneError(left)
        if refusal:
            raise inner_error(code, bytes(refusal))
        if answer.failure is not None:
            raise answer.failure
        if not ask.stream:
            await send(answer.whole())
