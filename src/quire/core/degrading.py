"""Giving less for a while when requests wait for longer than they should: in steps, each taken back by itself.

    pressure    how long the request that has waited longest relative to its level has waited, in levels; twice the
                level for a while after one was refused for want of capacity
    enter       the next step, each time that the pressure was 1 or more for `after` seconds
    leave       the last one, each time that it was below a half for five times as long

Between the two nothing changes, and what a step itself refuses is no pressure: so a step is not left at once because it
works, nor kept because it refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from quire.core.policy import BACKGROUND
from quire.objectives import DegradeStep, ServiceClass
from quire.types import Request

_CALM, _PATIENCE = 0.5, 5.0
LOOK_SECONDS = 0.1  # between two looks at what waits


class Degrading:
    """The steps of one engine. `after`: seconds that a request may wait where its class has no TTFT."""

    def __init__(self, steps: Sequence[DegradeStep], classes: Sequence[ServiceClass], after: float) -> None:
        self.steps, self.level = tuple(steps), 0
        # requests that each step changed; another model counts its own
        self.counts: Counter[str] = Counter({str(step): 0 for step in self.steps if step.kind != "model"})
        self._after = after
        self.use(classes)
        self._since = 0.0  # of the pressure being high, or low
        self._side = 0  # 1: high, -1: low, 0: between
        self._refused = float("-inf")
        self._looked = float("-inf")

    def use(self, classes: Sequence[ServiceClass]) -> None:
        """Go by these classes from now on; the steps that are entered stay."""
        bounds = [one.slo.ttft and one.slo.ttft / 1e3 for one in classes]
        # Where some class has a level, those without one may wait for any time.
        other = float("inf") if any(bounds) else self._after
        self._levels = [bound or other for bound in bounds] or [self._after]
        self._classes = len(classes)

    @property
    def active(self) -> tuple[DegradeStep, ...]:
        """The steps that are entered, the first one first."""
        return self.steps[: self.level]

    def value(self, kind: str) -> str | None:
        """That of an entered step of this kind; None without one."""
        return next((step.value for step in self.active if step.kind == kind), None)

    def refused(self, now: float) -> None:
        """A request was refused for want of capacity, not by a step."""
        self._refused = now

    def is_due(self, now: float) -> bool:
        """Whether to look at what waits; at most every LOOK_SECONDS."""
        return bool(self.steps) and now - self._looked >= LOOK_SECONDS

    def look(self, now: float, waiting: Iterable[Request]) -> bool:
        """Take in the requests that no step has started yet; whether a step was entered or left."""
        self._looked = now
        pressure = 2.0 if now - self._refused < self._after else 0.0
        for request in waiting:
            if request.priority < BACKGROUND:
                level = self._levels[min(request.terms.service_class, len(self._levels) - 1)]
                pressure = max(pressure, (now - request.arrival) / level)
        return self.observe(now, pressure)

    def observe(self, now: float, pressure: float) -> bool:
        """Take in the pressure; whether a step was entered or left."""
        side = 1 if pressure >= 1 else -1 if pressure < _CALM else 0
        if side != self._side:
            self._side, self._since = side, now
            return False
        lasts = now - self._since
        if side > 0 and self.level < len(self.steps) and lasts >= self._after:
            self.level += 1
        elif side < 0 and self.level and lasts >= _PATIENCE * self._after:
            self.level -= 1
        else:
            return False
        self._since = now
        return True

    def sheds(self, request: Request) -> bool:
        """Whether a request is refused: one of the last class; without classes, of a priority below the usual."""
        if self.value("shed") is None or request.priority >= BACKGROUND:
            return False
        last = request.terms.service_class >= self._classes - 1 if self._classes > 1 else request.priority > 0
        self.counts["shed"] += last
        return last

    def degraded(self, request: Request) -> Request:
        """The request as it is served now: with a lower max_tokens, but at least its min_tokens."""
        most, drafts = self.value("max_tokens"), self.value("speculation")
        if drafts is not None:
            self.counts[f"speculation={drafts}"] += 1
        if most is None or request.pooling:
            return request
        params = request.params
        limit = max(int(most), params.min_tokens, 1)
        if params.max_tokens is not None and params.max_tokens <= limit:
            return request
        self.counts[f"max_tokens={most}"] += 1
        return replace(request, params=replace(params, max_tokens=limit))
