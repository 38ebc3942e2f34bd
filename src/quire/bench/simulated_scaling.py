"""Servers that come and go with a load, on a virtual clock: what a rule for their number costs, and what it misses.

The servers are a fluid: they share all work evenly. Streams that run take their part of the time first, prompts get the
rest, one after the other. A request is late if its prompt is not computed within the level. A server that is ordered is
ready after `start` seconds, and paid for from then on.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

from quire.bench.traces import TraceRow
from quire.records import dataclass
from quire.routing.router_policies import ANSWER_TOKEN
from quire.routing.servers_needed import BUSY, ScalingBounds, ScalingRule, ServersNeeded

_TICK = 1.0  # seconds
_PACE = 0.03  # seconds between two tokens of an answer
_PROMPTS = 0.2  # of the time prompts get at least


@dataclass(frozen=True, slots=True)
class SeenLoad:
    """What a rule sees at a moment: `now`, servers that are ready, those ordered, requests that run and that wait,
    tokens of prompts that wait, and the work that came since the last moment."""

    now: float
    ready: int
    ordered: int
    running: int
    waiting: int
    tokens: float
    came: float


@dataclass(frozen=True, slots=True)
class ScaledRun:
    """What came of a run: the share of requests that were late, hours of servers, changes, and the most servers."""

    late: float
    hours: float
    changes: int
    most: int


WantedServers = Callable[[SeenLoad], int]


def by_forecast(
    level: float, start: float, bounds: ScalingBounds, token_seconds: float, first: int
) -> WantedServers:
    """Quire's rule, from so many servers on."""
    needed, rule = ServersNeeded(level, start), ScalingRule(bounds, first, 0.0)
    needed.answered(1.0, token_seconds)

    def wanted(seen: SeenLoad) -> int:
        if seen.came:
            needed.arrived(seen.came, seen.now)
        requests = seen.running + seen.waiting
        return rule.servers(needed.servers(seen.tokens, requests, seen.ready, seen.now), seen.now)

    return wanted


def by_utilization(
    bounds: ScalingBounds, token_seconds: float, first: int, target: float = BUSY
) -> WantedServers:
    """A reactive rule, that of Kubernetes' HorizontalPodAutoscaler with its defaults: every 15 s the share of busy time
    over the `target`, a tolerance of 10 %, and the most of 300 s before it goes down."""
    came: deque[tuple[float, float]] = deque()
    wishes: deque[tuple[float, int]] = deque()
    wishes.append((0.0, first))
    last, current = -math.inf, first

    def wanted(seen: SeenLoad) -> int:
        nonlocal last, current
        came.append((seen.now, seen.came))
        while seen.now - came[0][0] >= 60.0:
            came.popleft()
        if seen.now - last < 15.0:
            return current
        last = seen.now
        seconds = max(min(60.0, seen.now), 15.0)
        busy = sum(work for _, work in came) * token_seconds / seconds
        busy += seen.tokens * token_seconds / 15.0  # what waits keeps servers busy, too
        ratio = busy / max(1, current) / target
        wish = current if abs(ratio - 1) <= 0.1 else max(1, math.ceil(current * ratio))
        wishes.append((seen.now, wish))
        while seen.now - wishes[0][0] > 300.0:
            wishes.popleft()
        current = min(max(bounds.least, *(wish for _, wish in wishes)), bounds.most)
        return current

    return wanted


class _Fluid:
    """The servers and what they have to do."""

    def __init__(self, token_seconds: float) -> None:
        self._each = token_seconds
        self.waiting: deque[tuple[float, float, int]] = deque()  # arrival, tokens left, answer
        self.tokens = 0.0
        self._ends: list[float] = []  # of streams
        self.waits: list[float] = []

    @property
    def running(self) -> int:
        return len(self._ends)

    def add(self, row: TraceRow) -> None:
        self.waiting.append((row.at or 0.0, float(row.input_tokens), row.output_tokens))
        self.tokens += row.input_tokens

    def work(self, servers: int, now: float) -> None:
        """What so many servers do from `now` until the next moment."""
        while self._ends and self._ends[0] <= now:
            heapq.heappop(self._ends)
        streams = len(self._ends) * ANSWER_TOKEN * self._each / _PACE * _TICK
        room = max(servers * _TICK - streams, _PROMPTS * servers * _TICK)
        left = room
        while self.waiting and left > 0:
            at, tokens, answer = self.waiting[0]
            done = min(tokens, left / self._each)
            left -= done * self._each
            self.tokens -= done
            if done < tokens:
                self.waiting[0] = at, tokens - done, answer
                break
            self.waiting.popleft()
            end = max(at, now + _TICK * (1 - left / room))
            self.waits.append(end - at)
            heapq.heappush(self._ends, end + answer * _PACE)


def run(
    rows: Sequence[TraceRow],
    wanted: WantedServers,
    *,
    level: float,
    start: float,
    token_seconds: float,
    first: int,
) -> ScaledRun:
    """Serve a trace, from `first` servers on."""
    fluid, order = _Fluid(token_seconds), deque(rows)
    ready, coming = first, deque[float]()
    now, hours, changes, most = 0.0, 0.0, 0, first
    while order or fluid.waiting or fluid.running:
        came = 0.0
        while order and (order[0].at or 0.0) < now + _TICK:
            row = order.popleft()
            fluid.add(row)
            came += row.input_tokens + ANSWER_TOKEN * row.output_tokens
        while coming and coming[0] <= now:
            coming.popleft()
            ready += 1
        target = wanted(
            SeenLoad(now, ready, len(coming), fluid.running, len(fluid.waiting), fluid.tokens, came)
        )
        changes += target != ready + len(coming)
        while ready + len(coming) < target:
            coming.append(now + start)
        while coming and ready + len(coming) > target:
            coming.pop()
        ready = min(ready, target)
        fluid.work(ready, now)
        hours += (ready + len(coming)) * _TICK / 3600
        most = max(most, ready + len(coming))
        now += _TICK
    return ScaledRun(
        sum(wait > level for wait in fluid.waits) / max(1, len(fluid.waits)), hours, changes, most
    )
