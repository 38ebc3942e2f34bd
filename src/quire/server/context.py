"""What every route works with: the engine, the options, the served names, the counters."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol

from quire.config.serving import ServingConfig
from quire.engine.api import Engine, EngineState, ModelCard, require_ready
from quire.records import dataclass
from quire.server.errors import ApiError, shorten
from quire.server.exchange import Exchange, HangUpWatch
from quire.server.log_marks import Owners
from quire.server.logprob_bodies import TokenTexts
from quire.server.metrics import ServerMetrics
from quire.server.replay import Replays
from quire.server.request_memory import RequestMemory
from quire.server.served import Served, ServedModels
from quire.server.simulation_process import Simulations
from quire.server.step_profile import StepProfile
from quire.server.tenant_access import TenantDirectory
from quire.server.watched_engine import WatchedEngine

if TYPE_CHECKING:
    from quire.server.batches.batch_service import BatchService
    from quire.server.dialects.response_store import ResponseStore
    from quire.server.exposition import Exposition
    from quire.server.output_hooks import OutputHooks
    from quire.server.tool_servers import ToolServers
    from quire.server.tracing import Tracer


def directory_of(config: ServingConfig, place: str = "server") -> TenantDirectory:
    """The tenants of a server by its options; see TenantDirectory. Raises ValueError for files that cannot be read."""
    from quire.server.access import read_keys

    keys = [*read_keys(config), *read_keys(config, "admin_api_key")]
    return TenantDirectory(config, [key.encode() for key in keys], place=place)


_NAMES_SHOWN = 20  # in a message


class Reader(Protocol):
    """A destination of output."""

    def waiting(self, passed: float, /) -> float:
        """Seconds that output has been left unread, as of this call, `passed` seconds after the previous one."""

    def end_slow_reader(self) -> None:
        """Stop writing to it."""


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A change of the configuration: when, by whom, and what."""

    time: str
    by: str
    changed: dict[str, Any]


@dataclass(slots=True)
class ServerContext:
    """One server. `watches` (responses being written) and `connections` are checked for slow readers."""

    engine: Engine
    config: ServingConfig
    metrics: ServerMetrics
    directory: TenantDirectory | None = None  # that of a server of several models; else one of its own
    exposition: Exposition | None = None  # made at the first scrape
    watches: set[HangUpWatch] = field(default_factory=set)
    tracer: Tracer | None = None
    hooks: OutputHooks | None = None  # with --output-hook
    tools: ToolServers | None = None  # with --mcp
    responses: ResponseStore | None = None  # made at the first use
    behind: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # responses in the background, by id
    served: ServedModels = field(init=False)
    replays: Replays = field(init=False)
    owners: Owners = field(default_factory=Owners)
    watched_engine: WatchedEngine = field(init=False)
    profile: StepProfile = field(init=False)
    simulations: Simulations = field(init=False)
    connections: Collection[Reader] = ()
    batches: BatchService | None = None  # with --files-dir
    has_keys: bool = False  # clients must present a key
    router_key: bytes = field(init=False)  # that its option names
    tenants: TenantDirectory = field(init=False)
    memory: RequestMemory = field(init=False)
    changes: deque[ConfigChange] = field(default_factory=lambda: deque(maxlen=100))
    configuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    texts: TokenTexts = field(init=False)
    texts_as_ids: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        from quire.server.access import router_key

        self.router_key = router_key(self.config)
        self.tenants = self.directory or directory_of(self.config)
        self.metrics.tenants = self.tenants
        self.memory = RequestMemory(self.engine, self.config.max_num_queued_reqs)
        self.served = ServedModels(self.engine, self.config)
        self.replays = Replays(lambda: self.memory.replays)
        self.profile = StepProfile(self.engine, self.config.profile_dir)
        self.simulations = Simulations(self.config)
        self.watched_engine = WatchedEngine(self.engine, self.metrics)
        self.texts, self.texts_as_ids = TokenTexts(self.engine), TokenTexts(self.engine, as_ids=True)

    @contextlib.contextmanager
    def watched(self, watch: HangUpWatch) -> Iterator[None]:
        """Check this response for a slow reader while it is being written."""
        self.watches.add(watch)
        try:
            yield
        finally:
            self.watches.discard(watch)

    @property
    def state(self) -> EngineState:
        """Whether requests are taken."""
        return self.engine.state

    def check_ready(self) -> None:
        """Raise EngineUnavailableError while requests are not accepted."""
        require_ready(self.state)

    def card(self) -> ModelCard:
        """The model's card. Raises EngineUnavailableError while requests are not accepted."""
        self.check_ready()
        return self.engine.card

    def names(self) -> Sequence[str]:
        """The names of the model alone; the first is reported."""
        return self.served.base()

    def model(self, asked: str | None, exchange: Exchange | None = None) -> str:
        """The served name for the requested one. Raises ApiError as `find`."""
        return self.find(asked, exchange).name

    def find(self, asked: str | None, exchange: Exchange | None = None) -> Served:
        """What a requested name stands for. Raises ApiError 404 for an unknown one, 403 for one that the tenant of the
        exchange may not use.
        """
        tenant = "" if exchange is None else exchange.tenant
        found = self.served.find(asked)
        if found is None:
            may = [one.name for one in self.served.all() if self.tenants.may_use(tenant, one)]
            names = ", ".join(may[:_NAMES_SHOWN])
            message = f"model: {shorten(asked or '', 200)!r} is not served here; available: {names}"
            raise ApiError(404, message, code="model_not_found", param="model")
        self.tenants.check_model(tenant, found)
        return found

    def reload(self) -> None:
        """Read the file of tenants again, if there is one."""
        if self.config.tenants is not None:
            self.tenants.reload_or_log()

    async def sweep(self) -> None:
        """End responses whose client does not read; runs until cancelled."""
        await sweep_readers(
            self.config.reader_timeout, lambda: [*self.watches, *self.connections]
        )  # watches know more


async def sweep_readers(limit: float, readers: Callable[[], list[Reader]]) -> None:
    """End those whose client has not read for `limit` seconds; runs until cancelled.

    Time during which this process itself was suspended does not count: it wrote nothing that could be read.
    """
    pause, last = min(1.0, limit / 4), time.monotonic()
    while True:
        await asyncio.sleep(pause)
        now = time.monotonic()
        passed, last = min(now - last, 2 * pause), now
        for reader in [reader for reader in readers() if reader.waiting(passed) > limit]:
            reader.end_slow_reader()
