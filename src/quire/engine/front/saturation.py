"""What a saturated engine gives less of: where requests come in, and what the engine process is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from quire.config.schema import SchedulerOptions
from quire.core.degrading import Degrading
from quire.engine.api import EngineStats, GenerateAsk, OverloadedError, ShedError
from quire.engine.front.stream import LiveRequest
from quire.engine.host.messages import Command, LimitDrafts
from quire.objectives import parse_classes, parse_degrade

logger = logging.getLogger("quire.engine")
_ALL_DRAFTS = 2**30


class Saturation:
    """The steps of --degrade for one engine, to whose process `send` sends; see core.degrading."""

    def __init__(self, options: SchedulerOptions, send: Callable[[Command], None]) -> None:
        after = options.degrade_after_ms / 1e3
        self.degrading = Degrading(parse_degrade(options.degrade), parse_classes(options.slo), after)
        self._send = send

    def served(self, ask: GenerateAsk) -> GenerateAsk:
        """A request as it is served now. Raises ShedError for one that is not."""
        degrading = self.degrading
        if not degrading.level:
            return ask
        if degrading.sheds(ask.request):
            raise ShedError("this server is saturated: for now it takes no requests of the lowest class", 1.0)
        return replace(ask, request=degrading.degraded(ask.request))

    @contextmanager
    def admitting(self, now: float) -> Iterator[None]:
        """Count a refusal for want of capacity."""
        try:
            yield
        except OverloadedError:
            self.degrading.refused(now)
            raise

    def look(self, now: float, lives: Iterable[LiveRequest]) -> None:
        """Enter or leave a step by how long requests have waited."""
        degrading, before = self.degrading, self.degrading.value("speculation")
        if not degrading.is_due(now):
            return
        if degrading.look(now, (live.request for live in lives if not live.output.timings.scheduled)):
            names = ", ".join(map(str, degrading.active))
            logger.warning("degraded: %s", names or "not any more: all requests get all again")
            if degrading.value("speculation") != before:
                self.restarted()

    def restarted(self) -> None:
        """Tell the engine process how many drafts a sequence may have."""
        drafts = self.degrading.value("speculation")
        if any(step.kind == "speculation" for step in self.degrading.steps):
            self._send(LimitDrafts(_ALL_DRAFTS if drafts is None else int(drafts)))

    def add_to(self, stats: EngineStats) -> EngineStats:
        """The engine's report with the steps, and the requests that they changed."""
        degrading = self.degrading
        steps = {str(step): int(step in degrading.active) for step in degrading.steps}
        return replace(stats, degrade_steps=steps, degraded=dict(degrading.counts))
