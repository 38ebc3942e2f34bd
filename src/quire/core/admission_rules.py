"""Whether what a request wants can be kept: its deadlines, and the level of its class."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.core.forecast import Forecast
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


class Promises:
    """The deadlines of admitted requests, and by how much each is predicted to be kept. What is admitted later takes
    some of that: the time of its prompt, and of its rows in the steps of the others.
    """

    def __init__(self) -> None:
        self._slack: dict[
            str, tuple[float, float]
        ] = {}  # by request: seconds left over, tokens to come at most

    def __len__(self) -> int:
        return len(self._slack)

    def __contains__(self, name: str) -> bool:
        return name in self._slack

    def delay(self, prompt_seconds: float, output: float, row_seconds: float) -> float:
        """By how much the promise that could bear it least would be broken if a request were admitted; 0 for not."""
        short = [
            prompt_seconds + min(output, tokens) * row_seconds - slack
            for slack, tokens in self._slack.values()
        ]
        return max(0.0, max(short, default=0.0))

    def admitted(self, prompt_seconds: float, output: float, row_seconds: float) -> None:
        """A request was admitted, whatever it costs the others."""
        for name, (slack, tokens) in self._slack.items():
            self._slack[name] = slack - prompt_seconds - min(output, tokens) * row_seconds, tokens

    def make(self, name: str, slack: float, output: float) -> None:
        """Remember the deadline of an admitted request."""
        self._slack[name] = slack, output

    def ended(self, name: str) -> None:
        """A request has ended, kept or not."""
        self._slack.pop(name, None)


def check_wishes(
    prediction: Forecast,
    output: float,
    service: ServiceClass | None,
    *,
    elapsed: float = 0.0,
    caution: float = 1.0,
    end_caution: float = 1.0,
    start: float | None = None,
    finish: float | None = None,
) -> Broken | None:
    """The wish that would be missed by most, if any.

    `elapsed` seconds have passed since the request arrived; `start` and `finish` are its own limits in seconds from
    now; `output` is the length of its answer. `caution` is for first tokens, `end_caution` for ends.
    """
    slo, end = SLO() if service is None else service.slo, end_caution * prediction.finish(output)
    wishes: Sequence[tuple[str, float | None, float]] = (
        ("max_queue_ms", start, prediction.start),
        ("deadline_ms", finish, end),
        ("ttft", slo.ttft and slo.ttft / 1e3 - elapsed, caution * prediction.ttft),
        ("e2el", slo.e2el and slo.e2el / 1e3 - elapsed, end),
    )
    late = [
        Broken(name, elapsed + at, elapsed + seen, seen - at)
        for name, at, seen in wishes
        if at is not None and seen > at
    ]
    if not late:
        return None
    worst = max(late, key=lambda one: one.wait)
    name = worst.what if service is None or "_" in worst.what else f"{worst.what} of class {service.name}"
    return Broken(name, worst.limit, worst.predicted, min(worst.wait, 600.0))
