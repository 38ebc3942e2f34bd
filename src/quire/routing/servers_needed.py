"""How many servers a load needs, and how many to run: for a router, a stack, and the simulator of both.

Nothing here has a clock: callers say when something happens, in seconds of any clock. Work is counted as by
router_policies, in prompt tokens. A server takes a learned time for each of them (`token_seconds`), so the work that
comes in a second, times that, is the number of servers that are busy all the time. What comes is forecast for the
moment at which a server that is started now would be ready: Holt's linear trend, damped (Gardner and McKenzie 1985),
with a margin that covers most of the forecasts that were too low.
"""

from __future__ import annotations

import math
from collections import deque

from quire.records import dataclass

BIN = 10.0  # seconds of which the load is a mean
_LEVEL, _TREND, _DAMPING = 0.25, 0.1, 0.9  # weights of the newest bin, and what a trend loses in each
_COVERED = 0.8  # of the forecasts are not too low
_STEP = 0.03  # by which the margin moves
_MOST_MARGIN = 2.0
_RECENT = 6  # bins that are "now" where a forecast is compared with what came
BUSY = 0.75  # of the time of a server: beyond it queues grow long
_FORGET = 0.98  # of what was learned of times, with each answer
_OVERHEAD = 64.0  # tokens that a request costs beside those of its prompt
_FIRST_SECONDS = 1e-3  # for a token of a prompt, until answers say more


class WorkForecast:
    """The work that will come in a second, `ahead` seconds from now."""

    def __init__(self, ahead: float) -> None:
        self._bins = max(1, round(ahead / BIN))
        self._reach = sum(_DAMPING**number for number in range(1, self._bins + 1))
        self._level = self._trend = 0.0
        self._margin, self._seen = 1.0, 0
        self._arrived, self._since = 0.0, -math.inf
        self._made: deque[float] = deque(maxlen=self._bins)  # forecasts, without margin
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, work: float, now: float) -> None:
        """Work came."""
        self._close(now)
        self._arrived += work

    def rate(self, now: float) -> float:
        """Work a second to be expected."""
        self._close(now)
        return self._margin * max(self._level + self._reach * self._trend, 0.0)

    def _close(self, now: float) -> None:
        """End the bins that are over."""
        if math.isinf(self._since):
            self._since = now
        if now - self._since > 100 * BIN * self._bins:  # nobody asked for long
            self._since = now - BIN
        while now - self._since >= BIN:
            self._end_bin(self._arrived / BIN)
            self._arrived, self._since = 0.0, self._since + BIN

    def _end_bin(self, rate: float) -> None:
        self._recent.append(rate)
        self._seen += 1
        if len(self._made) == self._bins and self._made[0] > 0:
            short = sum(self._recent) / len(self._recent) / self._made[0] > self._margin
            self._margin += _STEP * (_COVERED if short else _COVERED - 1.0)
            self._margin = min(max(self._margin, 1.0), _MOST_MARGIN)
        before = self._level + _DAMPING * self._trend
        level = before + max(_LEVEL, 1.0 / self._seen) * (rate - before)
        if self._seen > 1:
            self._trend += (
                _TREND * (level - self._level - _DAMPING * self._trend) - (1 - _DAMPING) * self._trend
            )
        self._level = level
        self._made.append(max(self._level + self._reach * self._trend, 0.0))


class ServersNeeded:
    """The servers that a load needs so that prompts are computed within `level` seconds. One that is started now is
    ready after `start` seconds."""

    def __init__(self, level: float, start: float) -> None:
        self.level, self._start = level, start
        self._forecast = WorkForecast(start)
        self._tokens, self._seconds = 0.0, 0.0  # of answers, lately
        self._busy = -math.inf  # when there was a request last

    def arrived(self, work: float, now: float) -> None:
        """A request of so much work came."""
        self._busy = now
        self._forecast.add(work, now)

    def answered(self, tokens: float, seconds: float) -> None:
        """A server took so long for tokens: those of a prompt, and those that waited before it."""
        self._tokens = _FORGET * self._tokens + tokens
        self._seconds = _FORGET * self._seconds + seconds

    @property
    def token_seconds(self) -> float:
        """What a server takes for a token of a prompt, as far as answers have shown it."""
        return self._seconds / self._tokens if self._tokens and self._seconds > 0 else _FIRST_SECONDS

    def expected(self, tokens: float) -> float:
        """Seconds until an answer begins for which so many tokens are to be computed."""
        return (tokens + _OVERHEAD) * self.token_seconds

    def backlog(self, waiting: float, servers: float) -> float:
        """Seconds until so many waiting tokens of prompts are computed by so many servers."""
        return waiting * self.token_seconds / max(servers, 1.0)

    def servers(self, waiting: float, requests: int, ready: float, now: float) -> float:
        """The servers that are needed, not rounded, where so many are ready, so many tokens wait, and so many requests
        run or wait; at least 1 with a request, and for some seconds after it."""
        needed = self._forecast.rate(now) * self.token_seconds / BUSY
        late = waiting * self.token_seconds - self.level * ready  # server seconds that come too late
        if late > 0:
            needed = max(needed, ready) + late / max(self.level, self._start)
        if requests:
            self._busy = now
        return max(needed, 1.0) if now - self._busy < BIN else needed


@dataclass(frozen=True, slots=True)
class ScalingBounds:
    """How many servers may run. Fewer run only after fewer were needed for `down` seconds, and none after no request
    came for `idle` seconds."""

    least: int
    most: int
    down: float = 60.0
    idle: float = 300.0


class ScalingRule:
    """How many servers should run: as many as are needed at once, fewer only after a while."""

    def __init__(self, bounds: ScalingBounds, running: int, now: float) -> None:
        """From `running` servers on; nothing is known of the time before."""
        self.bounds = bounds
        self._wanted = deque([(now, running)])  # over the last seconds: falling
        self._busy = now  # when there was a request last

    def servers(self, needed: float, now: float) -> int:
        """The servers that should run from now on, where so many are needed."""
        bounds = self.bounds
        if needed >= 1.0:
            self._busy = now
        idle = now - self._busy >= bounds.idle
        wanted = 0 if idle else max(1, math.ceil(needed - 0.05))
        if idle:
            self._wanted.clear()
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now, wanted))
        while now - self._wanted[0][0] > bounds.down:
            self._wanted.popleft()
        return min(max(self._wanted[0][1], bounds.least), bounds.most)
