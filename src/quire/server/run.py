"""The life of one server: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn

from quire.config.serving import ServingConfig
from quire.engine.host.held import buffers
from quire.server.access import exposure
from quire.server.app import open_routes
from quire.server.connections import Connections, Listener, fit_descriptors
from quire.server.logs import log, notice
from quire.server.protocol import CLOSE_SECONDS, LimitedProtocol
from quire.server.realtime.websocket import take_over
from quire.util.listening import BindError, bind_path, server_tls
from quire.util.threads import full_pool

if TYPE_CHECKING:
    from quire.server.kserve.kserve_server import GrpcServer
    from quire.server.request_memory import RequestMemory

# Unread output that the kernel may hold per connection: small, so that a slow reader is noticed within seconds.
SEND_BUFFER_BYTES = 256 * 1024
BACKLOG = 2048
_THREADS = 6  # for work whose time grows with a body or an answer
# How long such work may hold the interpreter lock while the event loop waits for it. By default 5 ms, several times a
# request.
_SWITCH_SECONDS = 0.0005


class RunsEngines(Protocol):
    """An engine, or those of several models: what a server starts and stops. See Engine."""

    async def start(self) -> None: ...

    async def failed(self) -> None: ...

    async def stop(self, drain_seconds: float) -> None: ...


class RunsRequests(Protocol):
    """An ASGI application with what runs beside its requests: a Service, or that of several models or of a router."""

    @property
    def app(self) -> Any: ...

    @property
    def context(self) -> Any: ...

    @property
    def memory(self) -> RequestMemory: ...

    def start(self) -> None: ...

    def reload(self) -> None: ...

    async def stop_batches(self) -> None: ...

    async def stop(self) -> None: ...


def bind(config: ServingConfig) -> socket.socket:
    """A socket on the configured address or path. Raises BindError, which says what to change."""
    if config.uds is not None:
        return bind_path(config.uds, SEND_BUFFER_BYTES)
    return _bind_address(config.host, config.port, "--port")


def bind_admin(config: ServingConfig) -> socket.socket | None:
    """A socket for administrators, if they have an address of their own; the log says which. Raises BindError."""
    if config.admin_port is None:
        return None
    sock = _bind_address(config.admin_host or config.host, config.admin_port, "--admin-port")
    notice.warning("routes for administrators: %s", _url(config, sock))
    return sock


def bind_grpc(config: ServingConfig) -> socket.socket:
    """A socket for gRPC. Raises BindError."""
    assert config.grpc_port is not None
    return _bind_address(config.host, config.grpc_port, "--grpc-port")


def _bind_address(host: str, port: int, option: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
    try:
        sock.bind((host.strip("[]"), port))
        sock.listen(BACKLOG)  # makes a second server fail here, not at its first request
    except OSError as error:
        sock.close()
        hint = f"; choose another {option}" if port else ""
        raise BindError(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from None
    return sock


def address(config: ServingConfig, sock: socket.socket) -> str:
    """The address of the server, as users write it."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    return _url(config, sock)


def _url(config: ServingConfig, sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(config: ServingConfig) -> ssl.SSLContext | None:
    """The TLS context from the key and certificate files. Raises BindError when they cannot be used."""
    if config.ssl_keyfile is None or config.ssl_certfile is None:
        return None
    return server_tls(config.ssl_certfile, config.ssl_keyfile)


class HttpServer:
    """uvicorn serving an App on one socket. It answers as soon as it starts: 503 until the engine is ready."""

    def __init__(
        self, service: RunsRequests, config: ServingConfig, tls: ssl.SSLContext | None = None
    ) -> None:
        self._service = service
        self.context = self._service.context
        connections = Connections(
            fit_descriptors(config.max_connections), config.header_timeout,
            frozenset(route.path.encode() for route in open_routes(config) if route.open), config.access_log,
        )  # fmt: skip
        self._server = _Server(uvicorn.Config(
            self._service.app, http=LimitedProtocol, ws="none", lifespan="off",
            interface="asgi3", log_config=None, access_log=False, proxy_headers=False, server_header=False,
            timeout_keep_alive=config.keep_alive_timeout, timeout_graceful_shutdown=CLOSE_SECONDS,  # type: ignore[arg-type]
        ), connections, tls)  # fmt: skip
        connections.memory = service.memory
        connections.upgrade = take_over if "openai" in config.api else None
        connections.buffers = buffers(config)
        self.context.connections = self._server.server_state.connections
        self._serving: asyncio.Task[None] | None = None
        self.grpc = _grpc_server(service, config) if config.grpc_port is not None else None

    async def start(self, sock: socket.socket, admin: socket.socket | None = None) -> None:
        """Answer requests on `sock` from now on, and those of administrators on `admin` alone if there is one."""
        sys.setswitchinterval(_SWITCH_SECONDS)
        serving = self._serving = asyncio.create_task(
            self._server.serve([sock] if admin is None else [sock, admin])
        )
        self._service.start()
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.001)
        if serving.done():
            serving.result()
        if self.grpc is not None:
            self.grpc.start(bind_grpc(self.context.config))

    def reload(self) -> None:
        """Read the files of its service again."""
        self._service.reload()

    async def stop_batches(self) -> None:
        """Leave the batches where they are; the next server goes on with them."""
        await self._service.stop_batches()

    async def stop(self) -> None:
        """Close the socket and every connection; unfinished responses get a few seconds."""
        await self.stop_batches()
        if self.grpc is not None:
            await self.grpc.stop()
        self._server.should_exit = True
        assert self._serving is not None
        await self._serving
        await self._service.stop()


def _grpc_server(service: RunsRequests, config: ServingConfig) -> GrpcServer:
    """Raises BindError where its package is not installed."""
    try:
        from quire.server.kserve.kserve_server import GrpcServer
    except ModuleNotFoundError as error:
        raise BindError(f"grpc_port: needs {error.name}: pip install 'quire-llm[grpc]'") from None
    return GrpcServer(service.context, service.app, tls_context(config))


class _Server(uvicorn.Server):
    """Leaves signals and the listening socket to this module."""

    def __init__(self, config: uvicorn.Config, table: Connections, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._table, self._tls = table, tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = [
            Listener(sock, partial(self._accepted, admin=number > 0))  # type: ignore[misc]
            for number, sock in enumerate(sockets or ())
        ]
        self.started = True

    def _accepted(self, sock: socket.socket, *, admin: bool = False) -> None:
        protocol = LimitedProtocol(self._table, self.config, self.server_state, {})
        protocol.for_admin = admin
        protocol.accept(sock, self._tls)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    engine: RunsEngines,
    service: RunsRequests,
    config: ServingConfig,
    sock: socket.socket,
    announce: Callable[[], None],
    role: str = "",
) -> int:
    """Serve until a signal, then drain. Returns the exit status: 0 drained, 1 stopped at once or the engine failed.

    The first SIGTERM or SIGINT lets running requests finish for shutdown_timeout seconds while new ones get 503;
    a second ends at once. SIGHUP reads the TLS files and the tenants again. `announce` is called when the engine is
    ready; its routers know it, in its `role`, from then on to the first signal.
    Raises what Engine.start raises, and ValueError for a router that is wrong.
    """
    told = _announced(config, sock, role)
    tls = tls_context(config)
    admin = bind_admin(config)
    server = HttpServer(service, config, tls)
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    loop.add_signal_handler(signal.SIGHUP, _reload, tls, config, server)
    loop.set_default_executor(full_pool(_THREADS, "quire-work"))
    await server.start(sock, admin)
    for text in exposure(config):
        notice.warning("%s", text)
    try:
        if not await _start_engine(engine, signals):
            return 1
        announce()
        async with told as leave:
            first = await _signal_or_failure(engine, signals)
            leave()
            if first is None:
                log.error("the engine cannot be restarted: stopping the server")
                await engine.stop(0.0)
                return 1
            seconds = config.shutdown_timeout
            log.info("%s: draining for up to %g s; send it again to stop at once", first.name, seconds)
            await server.stop_batches()  # only clients are waited for
            return await _drain(engine, seconds, signals)
    finally:
        await server.stop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _announced(
    config: ServingConfig, sock: socket.socket, role: str
) -> contextlib.AbstractAsyncContextManager[Callable[[], None]]:
    """While its routers know a server. Raises ValueError."""
    if config.router is None:
        return contextlib.nullcontext(lambda: None)
    from quire.server.announcer import announced, announcers

    return announced(announcers(config, sock, role))


async def _start_engine(engine: RunsEngines, signals: asyncio.Queue[signal.Signals]) -> bool:
    """Load the model; false if a signal came first."""
    starting, interrupted = asyncio.create_task(engine.start()), asyncio.create_task(signals.get())
    await asyncio.wait({starting, interrupted}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        interrupted.cancel()
        starting.result()
        return True
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await engine.stop(0.0)
    return False


async def _signal_or_failure(
    engine: RunsEngines, signals: asyncio.Queue[signal.Signals]
) -> signal.Signals | None:
    """The next signal; None if the engine fails first, so that an orchestrator can restart the server."""
    signalled, failed = asyncio.create_task(signals.get()), asyncio.create_task(engine.failed())
    await asyncio.wait({signalled, failed}, return_when=asyncio.FIRST_COMPLETED)
    failed.cancel()
    if signalled.done():
        return signalled.result()
    signalled.cancel()
    return None


async def _drain(engine: RunsEngines, seconds: float, signals: asyncio.Queue[signal.Signals]) -> int:
    stopping, again = asyncio.create_task(engine.stop(seconds)), asyncio.create_task(signals.get())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        again.cancel()
        stopping.result()
        return 0
    log.warning("%s: stopping at once", again.result().name)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    await engine.stop(0.0)
    return 1


def _reload(tls: ssl.SSLContext | None, config: ServingConfig, server: HttpServer) -> None:
    """Read the files again that may have changed: certificates, and tenants."""
    _reload_tls(tls, config, server.grpc)
    server.reload()


def _reload_tls(tls: ssl.SSLContext | None, config: ServingConfig, beside: GrpcServer | None) -> None:
    """Use the certificate now on disk for new connections; the old one stays if that fails."""
    if tls is None or config.ssl_certfile is None:
        return
    try:
        tls.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if beside is not None:
            beside.reload()
        log.info("certificate reloaded")
    except (OSError, ssl.SSLError) as error:
        log.error("certificate not reloaded, still using the old one: %s", error)
