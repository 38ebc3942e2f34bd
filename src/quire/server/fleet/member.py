"""One model of several: its engine process, its APIs, and whether it is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from quire.config.lora_modules import adapter_paths
from quire.engine.api import (
    AdapterVersion,
    EngineState,
    EngineUnavailableError,
    OverloadedError,
    require_ready,
)
from quire.engine.front.async_engine import AsyncEngine
from quire.engine.host.memory_ledger import LedgerEntry
from quire.server.errors import ApiError
from quire.server.fleet.places import ModelPlaces
from quire.server.fleet.shares import ServedModel
from quire.server.logprob_bodies import TokenTexts
from quire.server.service import Service
from quire.server.tenant_access import TenantDirectory
from quire.types import QuireError

logger = logging.getLogger("quire.server")

_START_SECONDS = 0.5  # of an engine process before it reads weights
_READ_RATE = 0.5e9  # bytes a second, until a load was timed


class Member:
    """A version of a model. Its engine starts at the first request, and may leave when it is idle.

    `loading_turn` is held while weights are read: models load one after the other, each as fast as the disk. Its memory
    is one of `places`, or without them a share of its own.
    """

    def __init__(
        self,
        served: ServedModel,
        version: int,
        cores: str,
        loading_turn: asyncio.Lock,
        places: ModelPlaces | None = None,
        memory: LedgerEntry | None = None,
        tenants: TenantDirectory | None = None,
    ) -> None:
        self.served, self.version, self.places, self.memory = served, version, places, memory
        own = replace(
            served.serving,
            served_model_name=(served.name, *served.aliases),
            files_dir=None,
            grpc_port=None,
            kv_events_config=None,
        )  # what the whole server has
        self.engine = AsyncEngine(served.model, served.config, own, cores=cores, memory=memory)
        self.service = Service(self.engine, own, tenants)
        self.created = int(time.time())
        self.active = 0  # requests that were passed to it and have not ended
        self.used = time.monotonic()  # when the last one ended
        self.failure: Exception | None = None  # of the last load
        self.swap: asyncio.Future[None] | None = None  # while another version takes its place in memory
        self.held = False  # put to sleep by an administrator: requests do not wake it
        self.keep: float | None = None  # seconds that the last request lets it stay; None: as the server says
        self.loaded = False  # it was loaded once: its facts are known
        self._loaded = False  # the engine runs, or sleeps and can wake up
        self._loading_turn, self._change = loading_turn, asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None
        self._began, self._took = 0.0, 0.0
        self._waiting = 0
        self._quiet = asyncio.Event()  # set whenever a request ends

    @property
    def id(self) -> str:
        """The name of this very version."""
        return f"{self.served.name}@{self.version}"

    @property
    def state(self) -> str:
        """What it is doing, for people: unloaded, loading, asleep, or a state of its engine."""
        if self._loading is not None:
            return "loading"
        if not self._loaded:
            if self.held:
                return "sleeping"
            return "failed" if self.failure is not None else "unloaded"
        if self.engine.state is EngineState.SLEEPING:
            return "sleeping" if self.held else "unloaded"
        return str(self.engine.state)

    @property
    def adapters(self) -> Mapping[str, AdapterVersion | None]:
        """Its adapters by name; before it is loaded, those that it will begin with."""
        return (
            self.engine.adapters
            if self._loaded
            else dict.fromkeys(adapter_paths(self.served.serving.lora_modules))
        )

    async def ready(self, limit: float, most_waiting: int) -> None:
        """Return when requests can be passed to it; it is loaded if need be, which a cancelled wait does not stop.

        Raises EngineUnavailableError if that takes longer than `limit` seconds as far as is known, OverloadedError if
        too many wait, and ApiError 503 if it cannot be loaded.
        """
        if self.held:
            require_ready(EngineState.SLEEPING)
        if self._is_up():
            return
        left = self._estimate()
        if left > limit:
            self._load()  # the next one finds it loaded
            raise EngineUnavailableError(self._late(left), left)
        if self._waiting >= most_waiting:
            raise OverloadedError(f"{self._waiting} requests wait for {self.served.name} to be loaded", left)
        self._waiting += 1
        try:
            async with asyncio.timeout(limit):
                await asyncio.shield(self._load())
        except TimeoutError:
            raise EngineUnavailableError(self._late(self._estimate()), self._estimate()) from None
        except (QuireError, ValueError, OSError, MemoryError) as error:
            message = f"{self.served.name} cannot be loaded: {error}"
            raise ApiError(503, message, code="model_failed", param="model") from None
        finally:
            self._waiting -= 1

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """While a request is with it."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
            self._quiet.set()
            self.used = time.monotonic()
            if self.places is not None:
                self.places.look()

    async def load(self) -> None:
        """Load it, or wake it up. Raises the errors of loading."""
        self.held = False
        if not self._is_up():
            await asyncio.shield(self._load())

    def begin(self) -> None:
        """Begin to load it, or to wake it up; `state` and `failure` say what comes of it."""
        self.held = False
        if not self._is_up():
            self._load()

    async def sleep(self, level: int, drain_seconds: float, *, held: bool) -> None:
        """Give memory back; see Engine.sleep. One that is `held` sleeps until it is woken up.

        One that is not loaded, or sleeps already, has nothing left to give, but for the process of a sleep at level 1.
        Raises EngineUnavailableError if its engine is restarting or has failed.
        """
        async with self._change:
            asleep = self.engine.state is EngineState.SLEEPING
            if self._loaded and not asleep:
                await self.engine.sleep(level, drain_seconds)
            self.held = held
            if self._loaded and level == 2 and (asleep or self.places is not None):
                await self._end(0.0)

    async def leave(self) -> None:
        """Give back all memory, with what its tokenizer takes in this process; the next request loads it."""
        async with self._change:
            await self._end(0.0)

    async def drained(self, seconds: float) -> None:
        """Wait until no request is with it, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                while self.active:
                    self._quiet.clear()
                    await self._quiet.wait()
        except TimeoutError:
            logger.warning("%s: %d requests still ran after %g s", self.id, self.active, seconds)

    async def stop(self, drain_seconds: float) -> None:
        """End it."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self._end(drain_seconds)

    async def _end(self, drain_seconds: float) -> None:
        self._loaded = False  # from now on requests wait for it to be loaded
        await self.engine.stop(drain_seconds)
        context = self.service.context
        context.texts, context.texts_as_ids = TokenTexts(self.engine), TokenTexts(self.engine, as_ids=True)
        if self.places is not None:
            self.places.give(self)

    def idle(self, seconds: float) -> bool:
        """Whether it is loaded, and has had nothing to do for so long."""
        quiet = not self.active and not self._waiting and time.monotonic() - self.used >= seconds
        ready = self.engine.state is EngineState.READY
        failed = (
            self.places is not None and self.engine.state is EngineState.FAILED
        )  # it holds a place for nothing
        return quiet and self._loaded and (ready or failed)

    def _is_up(self) -> bool:
        """Whether nothing has to be loaded; what the engine cannot do now, its own APIs say."""
        return self._loading is None and self._loaded and self.engine.state is not EngineState.SLEEPING

    def _load(self) -> asyncio.Task[None]:
        if self._loading is None:
            self._began = time.monotonic()
            self._loading = asyncio.create_task(self._load_now())
            self._loading.add_done_callback(self._load_ended)
        return self._loading

    async def _load_now(self) -> None:
        if self.places is not None:
            await self.places.take(self)
        async with self._loading_turn, self._change:
            self._began = time.monotonic()
            try:
                await (self.engine.wake() if self._loaded else self.engine.start())
            except BaseException:
                if self.places is not None:
                    self.places.give(self)
                raise
            self._loaded = self.loaded = True
            self.used = time.monotonic()
            self._took = self.used - self._began

    def _load_ended(self, task: asyncio.Task[None]) -> None:
        self._loading = None
        self.failure = None if task.cancelled() else task.exception()  # type: ignore[assignment]
        if self.failure is not None:
            logger.error("%s could not be loaded: %s", self.id, self.failure)

    def _estimate(self) -> float:
        """Seconds until it is loaded: the time of its last load, else what its files take."""
        took = self._took or _START_SECONDS + _bytes_of(self.served.model) / _READ_RATE
        passed = time.monotonic() - self._began if self._loading is not None else 0.0
        return max(took - passed, 0.1 * took)

    def _late(self, left: float) -> str:
        return f"{self.served.name} is loading: ready in about {left:.1f} s"


def _bytes_of(model: str) -> int:
    """Bytes of the weights of a model that is here."""
    from quire.engine.build.opening import find_model

    try:
        path = find_model(model)
    except (QuireError, OSError):
        return 0
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(Path(file).stat().st_size for file in files)
