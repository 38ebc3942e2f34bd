"""Arrivals for a simulation, from published traces and from an engine's own log."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median

from quire.bench.fitted_steps import StepFit, fit_steps
from quire.bench.recorded_drafts import RecordedDrafts, recorded_drafts
from quire.bench.shared_cpus import CpuUse, cpu_use
from quire.bench.simulated_server import Arrival, Handover
from quire.bench.timeline import RequestRecord
from quire.bench.traces import TraceRow
from quire.core.scheduler_config import SchedulerConfig
from quire.offline.replay_log import config_of, outputs_of
from quire.records import dataclass
from quire.steplog import log_rows as rows
from quire.steplog.log_files import Log
from quire.steplog.log_rows import SAMPLE_BITS
from quire.types import QuireError

_IDS = 2**31 - 1
_LEAST = 32  # bounds that say when an engine has a request that is not the first one


class SimulationError(QuireError):
    """A simulation cannot run; the message says why."""


def arrivals_of_trace(trace: Sequence[TraceRow]) -> list[Arrival]:
    """The requests of a trace that have a prompt and an output.

    Prompts share tokens exactly where the trace says that blocks are equal. Raises SimulationError without times.
    """
    ids = _FreshIds()
    blocks: dict[int, array[int]] = {}
    found = []
    for row in trace:
        if row.at is None:
            raise SimulationError("trace: it has no arrival times")
        if row.input_tokens < 1 or row.output_tokens < 1:
            continue
        prompt = array("i")
        for block in row.blocks:
            if block not in blocks:
                blocks[block] = ids.take(row.block_tokens)
            prompt += blocks[block]
        prompt = prompt[: row.input_tokens]
        prompt += ids.take(row.input_tokens - len(prompt))
        found.append(Arrival(row.at, prompt, row.output_tokens))
    return found


class _FreshIds:
    """Token ids that differ, until there are no more: then it begins again."""

    def __init__(self) -> None:
        self._next = 1

    def take(self, count: int) -> array[int]:
        """The next ones, four bytes each."""
        if self._next + count > _IDS:
            self._next = 1
        first, self._next = self._next, self._next + count
        return array("i", range(first, first + count))


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """What a log says of a load: its requests, the limits of the scheduler, what steps took, and the times that its
    requests had, as the engine saw them. `hours` is what the log covers, `drafts` what became of drafts, `cpus` what
    was used of the machine's processors.
    """

    arrivals: list[Arrival]
    config: SchedulerConfig
    fit: StepFit
    classes: str
    records: list[RequestRecord]
    hours: float
    handover: Handover = Handover()
    drafts: RecordedDrafts | None = None
    cpus: CpuUse | None = None


def load_of_log(log: Log, last: float = math.inf) -> RecordedLoad:
    """The requests that came in the `last` seconds of a log and ended. Raises SimulationError."""
    opened = log.rows[0] if log.rows else None
    if not isinstance(opened, rows.Opened):
        raise SimulationError("the log does not begin with its options")
    config = config_of(opened)
    ids = _FreshIds()
    prompts: dict[tuple[int, int], array[int]] = {}
    asked: dict[int, rows.Arrived] = {}
    made: dict[int, int] = {}
    times: dict[int, RequestRecord] = {}
    size, end, none = config.block_size, 0.0, array("i")
    for row in log.rows:
        end = max(end, getattr(row, "at", 0) / 1e9)
        if isinstance(row, rows.Arrived):
            shared = _shared(row.chain, size, prompts, ids)
            prompt = shared + ids.take(row.prompt_tokens - len(shared))
            prompts[row.number, -1], asked[row.number] = prompt, row
            times[row.number] = RequestRecord(
                index=row.number, scheduled=row.arrival or row.at / 1e9, input_tokens=row.prompt_tokens,
                input_source="server", sent=row.arrival or row.at / 1e9,
            )  # fmt: skip
        elif isinstance(row, rows.Step):
            _note_tokens(row, times)
        for number, sample, tokens, _ in outputs_of(row):
            prompts[number, sample] = prompts.get((number, -1), none) + ids.take(tokens)
            made[number] = max(tokens, made.get(number, 0))
            if number in times:
                one = times[number]
                one.finished = one.closed = max(one.times, default=end)
                one.output_tokens, one.output_source = sum(one.counts), "server"
    kept = [number for number in made if number in asked and times[number].scheduled >= end - last]
    kept.sort(key=lambda number: times[number].scheduled)
    if not kept:
        raise SimulationError(
            "no request has ended in this log" if not made else "no request ended in that time"
        )
    first = times[kept[0]].scheduled
    found = [
        Arrival(
            times[number].scheduled - first, prompts[number, -1], max(1, made[number]),
            asked[number].service_class, asked[number].account, tenant=asked[number].domain[0],
        )
        for number in kept
    ]  # fmt: skip
    measured = [times[number] for number in kept if times[number].counts]
    return RecordedLoad(
        found, config, fit_steps(log.rows, opened.costs, first), opened.classes, measured, (end - first) / 3600,
        handover_of(log.rows), recorded_drafts(log.rows), cpu_use(log.rows),
    )  # fmt: skip


def _shared(
    chain: rows.TokenChain, size: int, prompts: dict[tuple[int, int], array[int]], ids: _FreshIds
) -> array[int]:
    """The tokens that a prompt has in common with an earlier one, also if the log has lost the row of that one."""
    count = chain.shared * size
    found = prompts.get(chain.like, array("i"))
    if len(found) < count:
        found = prompts[chain.like] = found + ids.take(count - len(found))
    return found[:count]


def handover_of(log: Sequence[rows.AnyRow]) -> Handover:
    """In the median. The log says which steps began before the engine had a request, and which one after that: so many
    requests are there later than the value that is found as are there before it."""
    steps: list[rows.Step] = []
    rests: list[bool] = []  # whether nothing was left after a step
    live: dict[int, int] = {}  # samples that have not ended
    came: list[rows.Arrived] = []
    for row in log:
        if isinstance(row, rows.Step):
            steps.append(row)
            rests.append(False)
        elif isinstance(row, rows.Arrived):
            live[row.number] = int(row.params.get("n", 1))
            came += [row] if row.arrival else []
        elif isinstance(row, (rows.Ended, rows.Aborted)):
            left = live.pop(row.number, 0) - 1
            if left > 0 and isinstance(row, rows.Ended):
                live[row.number] = left
            if rests and not live:
                rests[-1] = True
    begun = [step.at / 1e9 for step in steps]
    idle: list[float] = []
    others: dict[bool, list[float]] = {True: [], False: []}  # by whether the engine was at rest
    woken = set[int]()  # steps after which a request has come to an engine at rest
    for row in came:
        last, after = bisect_right(begun, row.arrival) - 1, bisect_left(begun, row.at / 1e9)
        if not 0 <= last < after < len(begun):
            continue
        rested = rests[last] and row.arrival > (steps[last].at + steps[last].updated) / 1e9
        if rested and last not in woken:
            woken.add(last)
            idle.append(begun[after] - row.arrival)
        else:
            others[rested] += begun[after - 1] - row.arrival, begun[after] - row.arrival
    alone = max(0.0, median(idle)) if idle else 0.0
    joining, busy = (
        max(0.0, median(others[rested])) if len(others[rested]) >= _LEAST else alone
        for rested in (True, False)
    )
    return Handover(alone, joining, busy)


def _note_tokens(step: rows.Step, times: dict[int, RequestRecord]) -> None:
    """Add the tokens of a step to the requests that have them; of several samples those of the first."""
    flat, at = step.rows, (step.at + step.updated) / 1e9
    for i in range(0, len(flat), 4):
        key, count = flat[i], flat[i + 3]
        record = times.get(key >> SAMPLE_BITS)
        if record is not None and count and not key & ((1 << SAMPLE_BITS) - 1):
            record.times.append(at)
            record.counts.append(count)
