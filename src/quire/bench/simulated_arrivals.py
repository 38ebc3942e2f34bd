"""Arrivals for a simulation, from published traces and from an engine's own log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.bench.simulated_server import Arrival
from quire.bench.traces import TraceRow
from quire.core.cost_model import StepCostModel
from quire.core.scheduler_config import SchedulerConfig
from quire.offline.replay_log import config_of
from quire.records import dataclass
from quire.steplog import log_rows as rows
from quire.steplog.log_files import Log
from quire.types import QuireError

_IDS = 2**31 - 1


class SimulationError(QuireError):
    """A simulation cannot run; the message says why."""


def arrivals_of_trace(
    trace: Sequence[TraceRow], longest: int, rate: float = 1.0
) -> tuple[list[Arrival], int]:
    """The requests of a trace, `rate` times as fast, and how many were left out because they exceed `longest` tokens.

    Prompts share tokens exactly where the trace says that blocks are equal. Raises SimulationError without times.
    """
    ids = _fresh()
    blocks: dict[int, list[int]] = {}
    found, longer = [], 0
    for row in trace:
        if row.at is None:
            raise SimulationError("trace: it has no arrival times")
        if row.input_tokens < 1 or row.output_tokens < 1 or row.input_tokens + row.output_tokens > longest:
            longer += 1
            continue
        prompt: list[int] = []
        for block in row.blocks:
            if block not in blocks:
                blocks[block] = [next(ids) for _ in range(row.block_tokens)]
            prompt += blocks[block]
        prompt = prompt[: row.input_tokens]
        prompt += [next(ids) for _ in range(row.input_tokens - len(prompt))]
        found.append(Arrival(row.at / rate, prompt, row.output_tokens))
    return found, longer


def _fresh() -> Iterator[int]:
    """Token ids that differ, until there are no more."""
    while True:
        yield from range(1, _IDS)


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """What a log says of a load: its requests, the limits of the scheduler, and what steps cost at the end."""

    arrivals: list[Arrival]
    config: SchedulerConfig
    costs: StepCostModel
    classes: str


def load_of_log(log: Log, rate: float = 1.0) -> RecordedLoad:
    """The requests that ended in a log, `rate` times as fast. Raises SimulationError."""
    opened = log.rows[0] if log.rows else None
    if not isinstance(opened, rows.Opened):
        raise SimulationError("the log does not begin with its options")
    config, costs = config_of(opened), StepCostModel(opened.costs)
    ids = _fresh()
    prompts: dict[tuple[int, int], list[int]] = {}
    asked: dict[int, rows.Arrived] = {}
    lengths: dict[int, int] = {}
    size = config.block_size
    for row in log.rows:
        if isinstance(row, rows.Arrived):
            shared = prompts.get(row.chain.like, [])[: row.chain.shared * size]
            prompt = shared + [next(ids) for _ in range(row.prompt_tokens - len(shared))]
            prompts[row.number, -1], asked[row.number] = prompt, row
        elif isinstance(row, rows.Ended):
            prompt = prompts.get((row.number, -1), [])
            prompts[row.number, row.sample] = prompt + [next(ids) for _ in range(row.tokens)]
            lengths[row.number] = max(row.tokens, lengths.get(row.number, 0))
        elif isinstance(row, rows.Changed) and row.name == "costs":
            costs = StepCostModel(row.values)
    first = min((asked[number].at for number in lengths if number in asked), default=0)
    found = [
        Arrival(
            (asked[number].at - first) / 1e9 / rate, prompts[number, -1], max(1, tokens),
            asked[number].service_class, asked[number].account,
        )
        for number, tokens in lengths.items()
        if number in asked
    ]  # fmt: skip
    if not found:
        raise SimulationError("no request has ended in this log")
    return RecordedLoad(sorted(found, key=lambda one: one.at), config, costs, opened.classes)
