"""A gRPC server beside the HTTP server. Needs the package `grpcio`, the extra `grpc`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from quire import __version__
from quire.config.serving import ServingConfig
from quire.engine.api import EngineState
from quire.engine.host.held import GRPC_CALLS, grpc_connections
from quire.server.access import AccessControl
from quire.server.context import ServerContext
from quire.server.errors import ApiError, ClientGoneError, api_error, bad_request, shorten
from quire.server.exchange import Exchange
from quire.server.inner_request import Application, stream_inner
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
WINDOW_BYTES = 16 * 1024  # of a message that nobody reads yet
_PATH = "/v1/completions"
_OPEN = frozenset({"ServerLive", "ServerReady"})
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED, 404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED, 413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED, 503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
Call = Any  # a grpc.aio.ServicerContext
Send = Callable[[Message], Awaitable[None]]


class GrpcError(QuireError):
    """The gRPC server cannot start."""


class GrpcServer:
    """Serves KServe's protocol in the running event loop. Inferences are requests that the server makes of itself, with
    the key of the call: validation, limits, memory and metrics are those of HTTP.
    """

    def __init__(self, context: ServerContext, application: Application) -> None:
        config = context.config
        self._config = config
        self._reload = False
        self._server = grpc.aio.server(
            handlers=[_Calls(context, application)],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_connection_idle_ms", int(config.keep_alive_timeout * 1000)),
                ("grpc.max_allowed_incoming_connections", grpc_connections(config)),
                ("grpc.max_concurrent_streams", GRPC_CALLS),
                # small windows: a message is read once there is memory for it
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
                ("grpc.so_reuseport", 0),  # a second server on the port fails to start
            ],
        )
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises GrpcError, which says what to change."""
        host = self._config.host.strip("[]")
        address = f"[{host}]:{self._config.grpc_port}" if ":" in host else f"{host}:{self._config.grpc_port}"
        try:
            if self._config.ssl_certfile is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._credentials())
        except RuntimeError as error:
            raise GrpcError(
                f"cannot listen on {address} (gRPC): {error}; choose another --grpc-port"
            ) from None
        await self._server.start()
        log.info("gRPC: listening on %s, port %d", host, self.port)

    def reload(self) -> None:
        """Read the TLS files again for the next connection."""
        self._reload = True

    async def stop(self) -> None:
        """End all calls and close the port."""
        await self._server.stop(0)

    def _credentials(self) -> grpc.ServerCredentials:
        def latest() -> grpc.ServerCertificateConfiguration | None:
            if not self._reload:
                return None
            self._reload = False
            try:
                return _certificate(self._config)
            except OSError:  # told where HTTP's certificate is read again
                return None

        return grpc.dynamic_ssl_server_credentials(_certificate(self._config), latest)


def _certificate(config: ServingConfig) -> grpc.ServerCertificateConfiguration:
    assert config.ssl_keyfile is not None
    assert config.ssl_certfile is not None
    pair = Path(config.ssl_keyfile).read_bytes(), Path(config.ssl_certfile).read_bytes()
    return grpc.ssl_server_certificate_configuration([pair])


class _CallWriter:
    """Sends the messages of a call, one after the other as gRPC wants them."""

    def __init__(self, exchange: Exchange, call: Call, seconds: float) -> None:
        self._exchange, self._call, self._seconds = exchange, call, seconds
        self._turn = asyncio.Lock()

    async def send(self, message: Message) -> None:
        """Send a message. Raises ClientGoneError for a client that does not read."""
        data = message.SerializeToString()
        async with self._turn:
            self._exchange.bytes_out += len(data)
            try:
                async with asyncio.timeout(self._seconds):
                    await self._call.write(data)
            except TimeoutError:
                self._exchange.details["ended"] = "did not read"
                raise ClientGoneError("did not read") from None


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
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

    def service(self, details: Any) -> Any:
        """The handler of a call; None for an unknown one, which gRPC answers."""
        service, _, name = details.method.removeprefix("/").partition("/")
        if service != SERVICE or name not in {*self._answers, "ModelInfer", "ModelStreamInfer"}:
            return None

        async def handle(_: Any, call: Call) -> None:
            await self._handle(name, call)

        # one message is on the wire what a stream of one is
        return grpc.stream_stream_rpc_method_handler(handle)

    async def _handle(self, name: str, call: Call) -> None:
        exchange, config = self._exchange(name, call), self._context.config
        try:
            await self._serve(name, exchange, call)
            exchange.status = 200
        except ClientGoneError as gone:
            await call.abort(grpc.StatusCode.CANCELLED, gone.reason)
        except (ApiError, QuireError) as error:
            found = api_error(error)
            exchange.status, exchange.details["error"] = found.status, found.code
            await call.abort(_CODES.get(found.status, grpc.StatusCode.INTERNAL), shorten(str(found)))
        finally:
            exchange.held.close()
            self._context.metrics.count_http(exchange)
            if config.access_log:
                log_access(exchange)

    async def _serve(self, name: str, exchange: Exchange, call: Call) -> None:
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
            await self._writer(exchange, call).send(self._answers[name](request))

    def _exchange(self, name: str, call: Call) -> Exchange:
        """The metadata of a call as headers."""

        async def never(*_: Any) -> Any:
            raise AssertionError("a call is not HTTP")

        headers = [
            (key.encode("latin-1"), value if isinstance(value, bytes) else value.encode("latin-1", "replace"))
            for key, value in call.invocation_metadata() or ()
        ]
        scope = {
            "type": "http", "method": "POST", "path": f"/{SERVICE}/{name}", "query_string": b"",
            "http_version": "2", "client": None, "headers": headers,
        }  # fmt: skip
        made = Exchange(scope, never, never, self._context.memory)
        made.handler = made.path
        return made

    async def _read(self, name: str, exchange: Exchange, call: Call) -> Message | None:
        """The next message; None at the end of the client's. Raises ApiError."""
        data = await call.read()
        if data is grpc.aio.EOF:
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

    async def _infer(self, exchange: Exchange, call: Call, request: Message) -> None:
        ask = read_ask(request, streams=False, deadline=call.time_remaining())
        await self._run(ask, exchange, self._writer(exchange, call).send)

    async def _serve_stream(self, exchange: Exchange, call: Call) -> None:
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

    async def _next(self, exchange: Exchange, call: Call, running: set[asyncio.Task[None]]) -> Message | None:
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

    def _writer(self, exchange: Exchange, call: Call) -> _CallWriter:
        return _CallWriter(exchange, call, self._context.config.reader_timeout)

    async def _answer(self, exchange: Exchange, call: Call, request: Message, writer: _CallWriter) -> None:
        kind = CLASSES["ModelStreamInferResponse"]

        async def send(response: Message) -> None:
            await writer.send(kind(infer_response=response))

        try:
            ask = read_ask(request, streams=True, deadline=call.time_remaining())
            await self._run(ask, exchange, send)
        except (ApiError, QuireError) as error:
            failed = kind(error_message=shorten(str(api_error(error))))
            failed.infer_response.id = request.id
            await writer.send(failed)

    async def _run(self, ask: InferenceAsk, exchange: Exchange, send: Send) -> None:
        """Make a request of the ask, and send what it answers. Raises ApiError and ClientGoneError."""
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

        await stream_inner(self._application, self._context.memory, _PATH, ask.body, exchange.tenant, take)
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
