"""What every route works with: the engine, the options, the served names, the counters."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Collection, Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Protocol

from quire import __version__
from quire.config.serving import ServingConfig
from quire.engine.api import Engine, ModelCard, require_ready
from quire.records import dataclass
from quire.server.errors import ApiError, shorten
from quire.server.exchange import HangUpWatch
from quire.server.logprob_bodies import TokenTexts
from quire.server.metrics import ServerMetrics
from quire.server.replay import Replays
from quire.server.request_memory import RequestMemory
from quire.server.step_profile import StepProfile

if TYPE_CHECKING:
    from quire.server.batches.batch_service import BatchService
    from quire.server.dialects.response_store import ResponseStore
    from quire.server.exposition import Exposition
    from quire.server.output_hooks import OutputHooks
    from quire.server.tracing import Tracer


class Reader(Protocol):
    """A destination of output."""

    def waiting(self, passed: float, /) -> float:
        """Seconds that output has been left unread, as of this call, `passed` seconds after the previous one."""

    def end_slow_reader(self) -> None:
        """Stop writing to it."""


@dataclass(slots=True)
class ServerContext:
    """One server. `watches` (responses being written) and `connections` are checked for slow readers."""

    engine: Engine
    config: ServingConfig
    metrics: ServerMetrics
    exposition: Exposition | None = None  # made at the first scrape
    watches: set[HangUpWatch] = field(default_factory=set)
    tracer: Tracer | None = None
    hooks: OutputHooks | None = None  # with --output-hook
    responses: ResponseStore | None = None  # made at the first use
    behind: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # responses in the background, by id
    replays: Replays = field(init=False)
    profile: StepProfile = field(init=False)
    connections: Collection[Reader] = ()
    batches: BatchService | None = None  # with --files-dir
    also: frozenset[str] = frozenset()  # names that were resolved before a request came here
    has_keys: bool = False  # clients must present a key
    memory: RequestMemory = field(init=False)
    texts: TokenTexts = field(init=False)
    texts_as_ids: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        self.memory = RequestMemory(self.engine, self.config.max_num_queued_reqs)
        self.replays = Replays(lambda: self.memory.replays)
        self.profile = StepProfile(self.engine, self.config.profile_dir)
        self.texts, self.texts_as_ids = TokenTexts(self.engine), TokenTexts(self.engine, as_ids=True)

    @contextlib.contextmanager
    def watched(self, watch: HangUpWatch) -> Iterator[None]:
        """Check this response for a slow reader while it is being written."""
        self.watches.add(watch)
        try:
            yield
        finally:
            self.watches.discard(watch)

    def card(self) -> ModelCard:
        """The model's card. Raises EngineUnavailableError while requests are not accepted."""
        require_ready(self.engine.state)
        return self.engine.card

    def names(self) -> tuple[str, ...]:
        """The names under which the model is served."""
        return self.config.served_model_name or (self.engine.card.name,)

    def model(self, asked: str | None) -> str:
        """The served name for the requested one. Raises ApiError 404 for an unknown name."""
        names = self.names()
        if asked is None:
            return names[0]
        if asked not in names and asked not in self.also:
            message = f"model: {shorten(asked, 200)!r} is not served here; available: {', '.join(names)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return asked

    def fingerprint(self) -> str:
        """Equal for equal versions of Quire serving the same model: what system_fingerprint promises."""
        text = f"{__version__} {self.engine.card.config_sha256} {self.engine.card.template_hash}"
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]

    async def sweep(self) -> None:
        """End responses whose client has not read for `reader_timeout` seconds; runs until cancelled.

        Time during which this process itself was suspended does not count: it wrote nothing that could be read.
        """
        limit = self.config.reader_timeout
        pause, last = min(1.0, limit / 4), time.monotonic()
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            passed, last = min(now - last, 2 * pause), now
            readers: list[Reader] = [*self.watches, *self.connections]  # watches know more
            for reader in [reader for reader in readers if reader.waiting(passed) > limit]:
                reader.end_slow_reader()
