"""The server's APIs as an ASGI application, to mount in one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import EngineState, require_ready
from quire.engine.front.serving_engine import serving_engine
from quire.llm.asked import engine_options
from quire.loader import DEFAULT_MODEL
from quire.server.access import ALL, read_keys
from quire.server.errors import ApiError
from quire.server.exchange import Receive, Scope, Send
from quire.server.request_memory import Held, RequestMemory
from quire.server.service import Service
from quire.types import QuireError

_SERVING = {f.name for f in dataclasses.fields(ServingConfig)}
# What the server that runs the application does, and Quire therefore does not.
_OF_THE_SERVER = frozenset({
    "host", "port", "uds", "ssl_keyfile", "ssl_certfile", "max_connections", "header_timeout", "keep_alive_timeout",
    "log_format", "log_level", "quiet",
})  # fmt: skip


class OpenAIApp:
    """An ASGI application with all routes of `quire serve`. The model runs in a process of its own.

    It is started and stopped by its lifespan: a server that runs the application itself does that; in another
    application it is `lifespan`, because frameworks leave out those of what they mount. It may be mounted under any
    prefix.
    """

    def __init__(self, model: str | Path, config: EngineConfig, serving: ServingConfig) -> None:
        self._model, self._config, self._serving = model, config, serving
        self._service: Service | None = None
        read_keys(serving)  # fails now if a key file cannot be read

    @asynccontextmanager
    async def lifespan(self, _application: object = None) -> AsyncIterator[None]:
        """Load the model, serve inside the block, then let running requests finish for `shutdown_timeout` seconds.

        Raises CheckpointError, UnsupportedModelError, MemoryBudgetError or QuireError.
        """
        if self._service is not None:
            raise QuireError("openai_app: its lifespan has already begun")
        engine = serving_engine(self._model, self._config, self._serving)
        service = self._service = Service(engine, self._serving)
        service.start()
        try:
            await engine.start()
            yield
        finally:
            await service.stop_batches()  # only clients are waited for
            await engine.stop(self._serving.shutdown_timeout)
            await service.stop()
            self._service = None

    def check(self) -> None:
        """Raise QuireError unless it is started, and its engine runs or will run again by itself."""
        if self._service is None:
            raise QuireError("openai_app: not started")
        if self._service.context.state is EngineState.FAILED:
            require_ready(EngineState.FAILED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or follow a server's lifespan."""
        if scope["type"] == "lifespan":
            await self._follow(receive, send)
            return
        if self._service is None:
            raise QuireError(
                "openai_app: not started; the application that it is mounted in needs its `lifespan`"
            )
        below, memory = _below_prefix(scope), self._service.context.memory
        if scope["type"] == "http":
            receive = _counted(below, receive, memory)
        await self._service.app(below, receive, send)

    async def _follow(self, receive: Receive, send: Send) -> None:
        """The lifespan protocol of ASGI: a start that fails is reported, and the server ends."""
        await receive()
        stage = "startup"
        try:
            async with self.lifespan():
                await send({"type": "lifespan.startup.complete"})
                await receive()
                stage = "shutdown"
        except (QuireError, ValueError) as error:
            await send({"type": f"lifespan.{stage}.failed", "message": str(error)})
        else:
            await send({"type": "lifespan.shutdown.complete"})


def _below_prefix(scope: Scope) -> Scope:
    """A copy of a scope with the path below the prefix that the application is mounted under, ASGI's root_path."""
    root, path = scope.get("root_path", ""), scope["path"]
    below = path[len(root) :] if root and path.startswith(f"{root}/") else path
    return {**scope, "path": below, "root_path": ""}


def _counted(scope: Scope, receive: Receive, memory: RequestMemory) -> Receive:
    """`receive`, which takes the memory of a request as its body arrives, as our own protocol does.

    What has no room is refused when the body is read.
    """
    held = scope["quire.held"] = Held()

    def take(work: Callable[[], None]) -> None:
        try:
            work()
        except ApiError as error:
            scope.setdefault("quire.refused", error)

    async def counting() -> MutableMapping[str, Any]:
        message = await receive()
        if size := len(message.get("body", b"")):
            take(lambda: memory.take_body(held, size))
        return message

    headers = scope["headers"]
    take(lambda: memory.take_head(held, sum(len(name) + len(value) for name, value in headers), len(headers)))
    return counting


def openai_app(model: str | Path = DEFAULT_MODEL, **options: Any) -> OpenAIApp:
    """The APIs of `quire serve` for a model, as an ASGI application to mount in one's own.

        app = quire.openai_app("path/to/model", memory="6GiB", api_key=("secret",))
        site = FastAPI(lifespan=app.lifespan)
        site.mount("/llm", app)

    Options are those of LLM and of `quire serve`, except for what the server that runs the application decides:
    addresses, TLS, connections and logs. Host names are checked only with `allowed_hosts`. Raises ValueError naming the
    option.
    """
    given = {name: value for name, value in options.items() if name in _SERVING}
    for name in sorted(given.keys() & _OF_THE_SERVER):
        raise ValueError(f"{name}: is up to the server that runs the application, not to openai_app")
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    serving = ServingConfig(**{"allowed_hosts": (ALL,), **given, **lists})
    return OpenAIApp(
        model, engine_options({name: value for name, value in options.items() if name not in given}), serving
    )
