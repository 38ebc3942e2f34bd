"""Whether what a request wants can be kept: its deadlines, and the level of its class."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from quire.core.forecast import Forecast, Live
from quire.core.guarantees import Price, StepRoom, expected_price, worst_end, worst_price
from quire.objectives import SLO, ServiceClass
from quire.records import dataclass

LATE, LATE_DEADLINES = 0.02, 0.005  # shares of admitted requests that may be late
_CAREFUL = 0.1
_MOST_CAUTION = 3.0


@dataclass(frozen=True, slots=True)
class Broken:
    """What would not be kept: the name of the wish, its limit and what is predicted, in seconds from the request's
    arrival; `wait` is the time after which the same request is likely to be admitted."""

    what: str
    limit: float
    predicted: float
    wait: float

    def __str__(self) -> str:
        seen = f"{self.predicted * 1e3:.0f} ms" if math.isfinite(self.predicted) else "more than that"
        return f"{self.what} of {self.limit * 1e3:.0f} ms cannot be kept: {seen} predicted"


class Caution:
    """By how much predictions are multiplied before they are compared with a level: more after each admitted request
    that was late, less after those in time, so that about `share` of them are late whatever predictions miss."""

    def __init__(self, share: float = LATE) -> None:
        self.factor, self._share = 1.0, share

    def answered(self, *, late: bool) -> None:
        """An admitted request got its first token."""
        self.factor += _CAREFUL * (1 - self._share if late else -self._share)
        self.factor = max(1.0, min(_MOST_CAUTION, self.factor))


@dataclass(slots=True)
class _Promise:
    """Seconds left over, tokens to come at most, and of a guaranteed one its place in the queue."""

    slack: float
    tokens: float
    place: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Burden:
    """What an arrival takes from the others, as predicted and at worst; and its place in the queue."""

    place: tuple[float, ...]
    expected: Price
    worst: Price

    def on(self, promise: _Promise) -> float:
        """What it takes from one, in seconds."""
        if promise.place is None:
            return self.expected.prompt + min(self.expected.output, promise.tokens) * self.expected.row
        ahead = self.worst.ahead if self.place < promise.place else 0.0
        return self.worst.prompt + min(self.worst.output, promise.tokens) * self.worst.row + ahead


class Promises:
    """The deadlines of admitted requests, and by how much each is predicted to be kept. What is admitted later takes
    some of that: the time of its prompt, and of its rows in the steps of the others; of guaranteed ones, all that it
    may take in the worst case.
    """

    def __init__(self) -> None:
        self._made: dict[str, _Promise] = {}  # by request

    def __len__(self) -> int:
        return len(self._made)

    def __contains__(self, name: str) -> bool:
        return name in self._made

    @property
    def guaranteed(self) -> bool:
        """Whether some of them hold in the worst case."""
        return any(promise.place is not None for promise in self._made.values())

    def weigh(
        self,
        new: Live,
        expected: float,
        others: Iterable[Live],
        costs: Sequence[float],
        room: StepRoom,
        *,
        margin: float,
        rows: int = 1,
        to_end: bool = False,
        most: float = math.inf,
    ) -> tuple[Burden, float]:
        """What a request of so many samples takes from others; with `to_end` also when it ends at the latest, in
        seconds from now, otherwise 0.

        `new` and `others` are in their worst case, `expected` is the length of the answer as predicted; `margin` is by
        how much steps may take longer than `costs` say, as a share. `others` are read only where a worst case counts.
        """
        usual = expected_price(costs, new.work.prompt, expected)
        if not (to_end or self.guaranteed):
            return Burden(new.place, usual, usual), 0.0
        slow = [weight * (1 + margin) for weight in costs]
        found = list(others)
        burden = Burden(new.place, usual, worst_price(slow, new, found, room, rows=rows))
        return burden, worst_end(slow, new, found, room, most=most) if to_end else 0.0

    def delay(self, burden: Burden) -> float:
        """By how much the promise that could bear it least would be broken if a request were admitted; 0 for not."""
        short = [burden.on(promise) - promise.slack for promise in self._made.values()]
        return max(0.0, max(short, default=0.0))

    def admitted(self, burden: Burden) -> None:
        """A request was admitted, whatever it costs the others."""
        for promise in self._made.values():
            promise.slack -= burden.on(promise)

    def make(self, name: str, slack: float, output: float, place: tuple[float, ...] | None = None) -> None:
        """Remember the deadline of an admitted request; of a guaranteed one also its place."""
        self._made[name] = _Promise(slack, output, place)

    def ended(self, name: str) -> None:
        """A request has ended, kept or not."""
        self._made.pop(name, None)


def check_wishes(
    prediction: Forecast,
    output: float,
    service: ServiceClass | None,
    *,
    elapsed: float = 0.0,
    waited: float | None = None,
    caution: float = 1.0,
    end_caution: float = 1.0,
    start: float | None = None,
    finish: float | None = None,
    worst: float = 0.0,
) -> Broken | None:
    """The wish that would be missed by most, if any.

    `elapsed` seconds have passed since the request arrived, `waited` (None: the same) since its own limits count;
    these are `start` and `finish`, in seconds from now; `output` is the length of its answer. `caution` is for first
    tokens, `end_caution` for ends; at `worst` it ends then.
    """
    slo, end = SLO() if service is None else service.slo, max(worst, end_caution * prediction.finish(output))
    own = elapsed if waited is None else waited
    wishes: Sequence[tuple[str, float, float | None, float]] = (
        ("max_queue_ms", own, start, prediction.start),
        ("deadline_ms", own, finish, end),
        ("ttft", elapsed, slo.ttft and slo.ttft / 1e3 - elapsed, caution * prediction.ttft),
        ("e2el", elapsed, slo.e2el and slo.e2el / 1e3 - elapsed, end),
    )
    late = [
        Broken(name, passed + at, passed + seen, seen - at)
        for name, passed, at, seen in wishes
        if at is not None and seen > at
    ]
    if not late:
        return None
    most = max(late, key=lambda one: one.wait)
    name = most.what if service is None or "_" in most.what else f"{most.what} of class {service.name}"
    return Broken(name, most.limit, most.predicted, min(most.wait, 600.0))
