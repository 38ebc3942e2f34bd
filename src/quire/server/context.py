"""What every route works with: the engine, the choices, the names, the counters."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field

from quire import __version__
from quire.config.serving import ServingConfig
from quire.engine.api import AsyncEngine, EngineState, EngineUnavailableError, ModelCard
from quire.server.errors import ApiError, shorten
from quire.server.exchange import HangUpWatch
from quire.server.metrics import ServerMetrics
from quire.server.replay import Replays
from quire.server.tracing import Tracer

_UNAVAILABLE = {
    EngineState.STARTING: "the model is loading",
    EngineState.RESTARTING: "the engine is starting again",
    EngineState.DRAINING: "the server is shutting down",
    EngineState.FAILED: "the engine has failed",
}


@dataclass(slots=True)
class ServerContext:
    """One server. `watches` are the responses being written now, for the sweep of slow readers."""

    engine: AsyncEngine
    config: ServingConfig
    metrics: ServerMetrics
    watches: set[HangUpWatch] = field(default_factory=set)
    tracer: Tracer | None = None
    replays: Replays = field(default_factory=Replays)

    def card(self) -> ModelCard:
        """The model's card. Raises EngineUnavailableError while there is none, or no request may start."""
        state = self.engine.state
        if state in _UNAVAILABLE:
            raise EngineUnavailableError(_UNAVAILABLE[state])
        return self.engine.card

    def names(self) -> tuple[str, ...]:
        """The names that the model answers to."""
        return self.config.served_model_name or (self.engine.card.name,)

    def model(self, asked: str | None) -> str:
        """The served name that a request means. Raises ApiError 404 for any other."""
        names = self.names()
        if asked is None:
            return names[0]
        if asked not in names:
            message = f"model: {shorten(asked, 200)!r} is not served here; it is {', '.join(names)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return asked

    def fingerprint(self) -> str:
        """Equal for equal versions of Quire serving the same model: what system_fingerprint promises."""
        text = f"{__version__} {self.engine.card.config_sha256} {self.engine.card.template_hash}"
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]

    async def sweep(self) -> None:
        """End responses whose client has not read for `reader_timeout` seconds; runs until cancelled.

        While this process itself stood still nobody was given anything to read: that time does not count.
        """
        limit = self.config.reader_timeout
        pause, last = min(1.0, limit / 4), time.monotonic()
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            passed, last = min(now - last, 2 * pause), now
            for watch in [w for w in self.watches if w.waiting(passed) > limit]:
                watch.end_slow_reader()
