"""Simulation 8 on the engine that serves: real requests, let in as static, dynamic and continuous batching would.

They are background work: requests of users come before them, and they end in any case. Steps are counted in the
engine's log, so that what batching costs is seen whatever else the machine does meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

from quire.learn.lanes import (
    MEAN,
    POLICIES,
    PROMPT,
    SLOTS,
    STEP,
    WAIT,
    Lane,
    LaneRequest,
    LaneStep,
    admitted,
    arrivals_of,
    lanes_scene,
    lengths_of,
)
from quire.learn.next_token import STORY
from quire.learn.scene import Scene, Value
from quire.planner.figure import Figure
from quire.records import dataclass
from quire.server.context import ServerContext
from quire.server.exchange import Exchange
from quire.server.pages.timed_answers import TimedAnswer, answered, likeliest
from quire.steplog.log_files import read_rows
from quire.steplog.log_rows import SAMPLE_BITS, Arrived, Opened, Step

_LANE_SECONDS = 1.0  # that arrivals of a lane may last
_LANE_REQUESTS = 24  # of a lane: the log keeps room for what others asked
_MOST_SECONDS = 20.0  # of all requests together


class _NotCountedError(ValueError):
    """The log has not all steps of the requests."""


@dataclass(frozen=True, slots=True)
class _Due:
    """A request of so many tokens, due at a time in seconds."""

    at: float
    tokens: int


class _Lanes:
    """Runs lanes of requests on the engine, in at most `slots` places, until `end` of time.monotonic()."""

    def __init__(self, context: ServerContext, exchange: Exchange, prompt: Sequence[int]) -> None:
        self._context, self._exchange, self._prompt = context, exchange, prompt
        self._end = time.monotonic() + _MOST_SECONDS
        self.slots = min(SLOTS, context.engine.card.max_num_seqs)

    async def run(self, policy: str, jobs: Sequence[_Due], wait: float) -> Lane:
        """What a kind of batching makes of them; `wait` is the limit of dynamic batching, in seconds. Raises
        _NotCountedError, and what the engine raises for a request."""
        began = time.monotonic()
        left, waiting = deque(jobs), deque[_Due]()
        running: dict[asyncio.Task[TimedAnswer], _Due] = {}
        ended: list[tuple[_Due, TimedAnswer]] = []
        try:
            while left or waiting or running:
                now = time.monotonic() - began
                while left and left[0].at <= now:
                    waiting.append(left.popleft())
                count = admitted(
                    policy, waiting=len(waiting), running=len(running), slots=self.slots, wait=wait, last=not left,
                    waited=now - waiting[0].at if waiting else 0.0,
                )  # fmt: skip
                # All of them begin in one turn of the event loop, so they reach the engine before its next step.
                for due in [waiting.popleft() for _ in range(count)]:
                    running[asyncio.create_task(self._answer(due.tokens))] = due
                looks = [left[0].at] if left else []
                if policy == "dynamic" and waiting and not running:
                    looks.append(waiting[0].at + wait)
                await _one_of(running, min(looks) + began - time.monotonic() if looks else None)
                done = [task for task in running if task.done()]
                ended += [(running.pop(task), task.result()) for task in done]
        finally:
            for task in running:
                task.cancel()
        return await self._counted(ended, began)

    async def _answer(self, tokens: int) -> TimedAnswer:
        return await answered(
            self._context, self._exchange, self._prompt, likeliest(tokens, to_the_end=True), speculate=False,
            background=True, deadline=self._end,
        )  # fmt: skip

    async def _counted(self, ended: Sequence[tuple[_Due, TimedAnswer]], began: float) -> Lane:
        log = await self._context.engine.log()
        steps = await asyncio.to_thread(_steps, log, {one.request_id: one.tokens for _, one in ended}, began)
        requests = [
            LaneRequest(
                due.at,
                one.arrived - began + one.times[0] / 1e3,
                one.arrived - began + one.times[-1] / 1e3,
                one.tokens,
            )
            for due, one in sorted(ended, key=lambda pair: pair[0].at)
        ]
        return Lane(steps, requests, self.slots)


async def _one_of(running: Collection[asyncio.Task[TimedAnswer]], seconds: float | None) -> None:
    """Until one has ended, or so many seconds have passed: it is time to look at what waits."""
    if running:
        timeout = None if seconds is None else max(0.0, seconds)
        await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    else:
        await asyncio.sleep(max(0.0, seconds or 0.0))


def _steps(log: bytes, tokens: Mapping[str, int], began: float) -> list[LaneStep]:
    """The steps in which some of the requests had a row, with as many rows as they had. Raises _NotCountedError if
    they are not all there: each token of an answer comes of one of them."""
    rows = read_rows(log, keep=lambda row: isinstance(row, Arrived | Step)).rows if log else []
    numbers = {
        row.number: row.request_id for row in rows if isinstance(row, Arrived) and row.request_id in tokens
    }
    seen: Counter[str] = Counter()
    found = []
    for row in rows:
        if isinstance(row, Step):
            ours = [name for key in row.rows[::4] if (name := numbers.get(key >> SAMPLE_BITS))]
            seen.update(ours)
            if ours:
                found.append(LaneStep(row.at / 1e9 - began, row.updated / 1e9, len(ours)))
    if any(seen[name] < count for name, count in tokens.items()):
        raise _NotCountedError("the log of the engine does not have all steps of these requests")
    return found


def _shared(log: bytes) -> bool:
    """Whether steps share the sequences that decode, as those of a pipeline do."""
    rows = read_rows(log, keep=lambda row: isinstance(row, Opened)).rows if log else []
    return any(row.options.get("takes_turns") for row in rows if isinstance(row, Opened))


async def real_lanes(context: ServerContext, exchange: Exchange, values: Mapping[str, Value]) -> Scene:
    """A closed batch, and three lanes of the same arrivals. The clock of the arrivals goes as fast as this engine's
    steps: one of them takes the place of the lesson's."""
    if not values["real"]:
        return Scene([])
    if len(context.engine.stats.replica_requests) > 1:
        return Scene([], remark="Replicas have steps of their own: they are not counted here.")
    if await asyncio.to_thread(_shared, await context.engine.log()):
        return Scene(
            [],
            remark="In a pipeline each step has half of the rows, so there are twice as many: none are counted.",
        )
    start = await context.engine.encode(STORY)
    lanes = _Lanes(context, exchange, [*start, *start * PROMPT][:PROMPT])
    variance, seed = int(values["variance"]), int(values["seed"])
    longest = context.engine.card.max_model_len - PROMPT
    try:
        lengths = [min(one, longest) for one in lengths_of(lanes.slots, variance, seed)]
        closed = await lanes.run("static", [_Due(0.0, one) for one in lengths], 0.0)
        mean = sum(lengths) / len(lengths)
        ratio = Figure(
            "this server: steps of a closed batch, to the mean length", len(closed.steps) / mean, "×",
            f"{len(closed.steps)} steps, L_max / L̄ = {max(lengths) / mean:.3f}",
        )  # fmt: skip
        first, last = closed.steps[0], closed.steps[-1]
        step = (last.begin + last.seconds - first.begin) / len(closed.steps)
        jobs = _within(values, step / STEP, longest)
        if len(jobs) < lanes.slots:
            return Scene(
                [ratio], remark=f"A step takes {1e3 * step:.1f} ms here: the lanes would take too long."
            )
        ran = {policy: await lanes.run(policy, jobs, WAIT * step / STEP) for policy in POLICIES}
    except _NotCountedError as error:
        return Scene([], remark=f"Nothing is counted: {error}.")
    scene = lanes_scene(ran, before="this server, ", where=", on this server", ms=True)
    return Scene([ratio], remark=_said(jobs, int(values["requests"]), step)).beside(scene)


def _within(values: Mapping[str, Value], scale: float, longest: int) -> list[_Due]:
    """The first of the lesson's requests, on a clock that is so many times slower, as long as a lane may last."""
    count, seed = int(values["requests"]), int(values["seed"])
    dues = arrivals_of(float(values["rate"]), count, seed)
    lengths = lengths_of(count, int(values["variance"]), seed)
    return [
        _Due(due * scale, min(tokens, longest))
        for due, tokens in zip(dues[:_LANE_REQUESTS], lengths, strict=False)
        if due * scale <= _LANE_SECONDS
    ]


def _said(jobs: Sequence[_Due], wanted: int, step: float) -> str:
    some = f"the first {len(jobs)} of {wanted}" if len(jobs) < wanted else f"all {wanted}"
    return (
        f"On this server a step took {1e3 * step:.2f} ms in place of {1e3 * STEP:.0f}: {some} requests came at that"
        f" pace, about {MEAN} tokens each, as background work. Their steps are those of the engine's log."
    )
