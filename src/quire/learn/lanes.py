"""Simulation 8: lanes of static, dynamic and continuous batching, whoever ran them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from quire.learn.scene import Chart, ChartSeries, Scene, Table
from quire.planner.figure import Figure
from quire.records import dataclass

POLICIES = ("static", "dynamic", "continuous")
SLOTS, MEAN, PROMPT = 8, 40, 16  # sequences at once, tokens of a mean answer, tokens of a prompt
WAIT, STEP = 0.2, 0.02  # seconds that a dynamic batch waits, and that a step takes in the lesson
_TITLES = (
    "batching", "places in use", "mean latency", "wait for the first token", "empty places", "tokens/s", "tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LaneStep:
    """A step of a lane: its begin and its length in seconds, and its sequences."""

    begin: float
    seconds: float
    rows: int


@dataclass(frozen=True, slots=True)
class LaneRequest:
    """A request of a lane: when it was due, had its first token, and ended, in seconds, and its tokens."""

    due: float
    first: float
    end: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Lane:
    """What one kind of batching made of the requests, in at most `slots` places."""

    steps: Sequence[LaneStep]
    requests: Sequence[LaneRequest]
    slots: int

    @property
    def use(self) -> float:
        """Percent of the places of all steps that held a sequence."""
        held = sum(step.rows for step in self.steps)
        return 100 * held / (self.slots * len(self.steps)) if self.steps else 0.0

    @property
    def empty(self) -> int:
        """Places of all steps that held none."""
        return sum(self.slots - step.rows for step in self.steps)


def lengths_of(count: int, variance: int, seed: int) -> list[int]:
    """Lengths of outputs around a mean, up to `variance` percent more or less."""
    rng = random.Random(seed)
    spread = MEAN * variance // 100
    return [max(1, MEAN + rng.randint(-spread, spread)) for _ in range(count)]


def arrivals_of(rate: float, count: int, seed: int) -> list[float]:
    """When requests come, in seconds from the first: by chance, so many a second."""
    rng, at, found = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        found.append(at)
        at += rng.expovariate(rate)
    return found


def admitted(
    policy: str, *, waiting: int, running: int, slots: int, waited: float, wait: float, last: bool
) -> int:
    """How many of the waiting requests start now. `waited`: seconds that the oldest of them has waited; `last`: no
    more will come. A whole batch starts when none runs: full, or with all that is left, or (dynamic) after `wait`."""
    if policy == "continuous":
        return min(waiting, slots - running)
    late = policy == "dynamic" and waited >= wait
    opens = not running and (waiting >= slots or last or late)
    return min(waiting, slots) if opens else 0


def lanes_scene(lanes: dict[str, Lane], *, before: str = "", where: str = "", ms: bool = False) -> Scene:
    """Figures, lanes and a table of them. `before` stands before a figure's label and `where` behind a title; times are
    shown in seconds, or `ms`."""
    unit, scale, name = ("ms", 1e3, "ms") if ms else ("s", 1.0, "seconds")
    figures, rows = [], []
    for policy, lane in lanes.items():
        count, tokens = len(lane.requests), sum(one.tokens for one in lane.requests)
        mean = scale * sum(one.end - one.due for one in lane.requests) / count
        waits = scale * sum(one.first - one.due for one in lane.requests) / count
        end = max(one.end for one in lane.requests)
        rows.append(
            (policy, f"{lane.use:.0f} %", f"{mean:.2f} {unit}", f"{waits:.2f} {unit}", f"{lane.empty:,}",
             f"{tokens / end:.0f}", f"{tokens:,}")
        )  # fmt: skip
        figures.append(
            Figure(f"{before}{policy}: places in use", lane.use, "%", f"mean latency {mean:.2f} {unit}")
        )
    slots = max(lane.slots for lane in lanes.values())
    chart = Chart(
        f"Sequences in each step{where}", "lines", name, f"of {slots} places",
        [_line(policy, lane, scale, ms) for policy, lane in lanes.items()], levels=[("places", float(slots))],
    )  # fmt: skip
    return Scene(figures, [chart], tables=[Table(f"The same requests{where}", _TITLES, rows)])


def _line(name: str, lane: Lane, scale: float, measured: bool) -> ChartSeries:
    """Sequences of each step, and none between steps that do not follow each other. Between `measured` ones there is
    always something to do: they follow each other if less time passes than three of them take."""
    near = 3 * statistics.median(step.seconds for step in lane.steps) if measured else 1e-9
    points: list[tuple[float, float]] = []
    for step, after in zip(lane.steps, [*lane.steps[1:], None], strict=True):
        end = step.begin + step.seconds
        points.append((step.begin, step.rows))
        if after is not None and after.begin <= end + near:
            points.append((after.begin, step.rows))
            continue
        points += [(end, step.rows), (end, 0.0)]
        if after is not None:
            points.append((after.begin, 0.0))
    return ChartSeries(name, [scale * at for at, _ in points], [rows for _, rows in points])
