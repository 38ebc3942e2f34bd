"""Runs a log again: the same arrivals through the same decisions, step by step.

    virtual   the engine's loop and scheduler, a clock that shows what was read then, and a worker that answers what the
              log says: the schedule is compared
    real      with recorded prompts, the engine with its model: schedule and tokens are compared

Without recorded prompts the tokens are made up, equal where the log says that blocks were shared. A replay stops at the
first step that differs.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from quire.cache_kinds import CacheGroup, FullGroup, SlidingGroup, StateGroup
from quire.config.live import LiveEngineConfig
from quire.core.controller import StepController
from quire.core.cost_model import StepCostModel
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import Sequence
from quire.engine.core import EngineCore
from quire.engine.whole_batches import WholeBatchScheduler
from quire.executor.plans import PlanCounts
from quire.logprobs import LogprobTable
from quire.objectives import ServiceTerms, parse_classes
from quire.records import dataclass
from quire.steplog import log_rows as rows
from quire.steplog.log_files import Log
from quire.steplog.log_rows import SAMPLE_BITS, AnyRow, LogRow
from quire.steplog.recorder import Recorder
from quire.types import (
    PARAMETERS,
    FinishReason,
    Grammar,
    QuireError,
    Request,
    SamplingParams,
    SchedulerOutput,
    StepOutput,
    TokenIds,
)

if TYPE_CHECKING:
    from quire.worker.worker import Masks

_END = 2**31 - 1  # made-up token that ends a sample
_FAILURES = {
    rows.FAILED: FinishReason.ERROR,
    rows.NO_TOKEN: FinishReason.NO_TOKEN,
    rows.DEAD_END: FinishReason.GRAMMAR_DEAD_END,
    rows.GRAMMAR_LIMIT: FinishReason.GRAMMAR_LIMIT,
}
_GROUPS: Mapping[str, Callable[..., CacheGroup]] = {
    kind.__name__: kind for kind in (FullGroup, SlidingGroup, StateGroup)
}


class ReplayError(QuireError):
    """A log cannot be run again; the message says why."""


@dataclass(slots=True)
class Replayed:
    """What came of a replay. `difference` says what differs first; empty if nothing does. `digest` is a hash of all
    steps. `unfinished` are the sequences that still ran or waited at the end.
    """

    steps: int = 0
    requests: int = 0
    seconds: float = 0.0
    difference: str = ""
    digest: str = ""
    compared_tokens: int = 0
    unfinished: int = 0


def schedule_of(step: rows.Step) -> dict[str, Any]:
    """What was decided in a step, in the order in which differences are told."""
    flat, started = step.rows, step.started
    return {
        "number": step.number,
        "limits": list(step.limits),
        "started": [tuple(started[i : i + 2]) for i in range(0, len(started), 3)],
        "rows": [tuple(flat[i : i + 3]) for i in range(0, len(flat), 4)],
        "preempted": list(step.preempted),
        "blocks": step.blocks,
        "waiting": step.waiting,
    }


def schedule_digest(steps: Iterator[rows.Step] | list[rows.Step]) -> str:
    """A hash of the decisions of steps."""
    digest = blake2b(digest_size=16)
    for step in steps:
        digest.update(repr(schedule_of(step)).encode())
    return digest.hexdigest()


def outputs_of(row: AnyRow) -> Iterator[tuple[int, int, int, rows.TokenChain]]:
    """Request, sample, tokens and their chain of each output that a row ends."""
    if isinstance(row, rows.Ended):
        yield row.number, row.sample, row.tokens, row.chain
    elif isinstance(row, rows.Aborted):
        for sample, tokens, chain in row.made:
            yield row.number, sample, tokens, chain


class _Lines:
    """The tokens of each sample, as recorded or made up."""

    def __init__(self, log: list[AnyRow], size: int) -> None:
        self._fresh = 0
        self._found: dict[tuple[int, int], list[int]] = {}
        for row in log:
            if isinstance(row, rows.Arrived):
                self._found[row.number, -1] = self._line(row.chain, size, row.prompt_tokens, [])
            else:
                for number, sample, count, chain in outputs_of(row):
                    prompt = self._found.get((number, -1), [])
                    line = self._line(chain, size, len(prompt) + count, prompt)
                    self._found[number, sample] = line
                    if prompt:  # a block that output has filled begins with the end of the prompt
                        self._found[number, -1] = line[: len(prompt)]

    def prompt(self, number: int) -> list[int]:
        """Of a request."""
        return self._found[number, -1]

    def next(self, key: int, at: int, count: int) -> list[int]:
        """Tokens of a sample from a position on."""
        name = key >> SAMPLE_BITS, key & (1 << SAMPLE_BITS) - 1
        line = self._found.setdefault(name, list(self._found.get((name[0], -1), [])))
        while len(line) < at + count:
            line.append(self.fresh())
        return line[at : at + count]

    def fresh(self) -> int:
        """A token that no other has."""
        self._fresh += 1
        return self._fresh

    def _line(self, chain: rows.TokenChain, size: int, length: int, prompt: list[int]) -> list[int]:
        if chain.tokens:
            return [*prompt, *array("i", chain.tokens)]
        found = self._found.get((chain.like[0], chain.like[1]), [])[: chain.shared * size]
        found = list(prompt) if len(found) < len(prompt) else found
        return found + [self.fresh() for _ in range(length - len(found))]


class _Tap(Recorder):
    """Keeps the last step that an engine has recorded."""

    last: rows.Step | None = None

    def number(self, number: int) -> None:
        """That of the next request."""
        self._next = number

    def _put(self, row: LogRow, _in_file: LogRow | None = None) -> None:
        if isinstance(row, rows.Step):
            self.last = row


class _ScriptedWorker:
    """Answers each step as the log says."""

    plans = PlanCounts()

    def __init__(self, lines: _Lines, block_size: int) -> None:
        self._lines, self._block_size = lines, block_size
        self._step: rows.Step | None = None
        self._out: SchedulerOutput | None = None
        self._made: dict[int, int] = {}  # key -> tokens known
        self._keys: dict[int, int] = {}
        self.scored: dict[int, int] = {}  # tokens of prompts that get logprobs, by request
        self._starts: dict[int, deque[int]] = {}  # by key: positions at which it starts and resumes

    def expect(self, log: list[AnyRow]) -> None:
        """Take from the log what copies of parts of blocks saved: made-up tokens are shared in whole blocks."""
        for step in log:
            if isinstance(step, rows.Step) and step.started:
                first = dict(zip(step.rows[::4], step.rows[1::4], strict=True))
                for key in step.started[::3]:
                    self._starts.setdefault(key, deque()).append(first.get(key, 0))

    def part(self, seq: Sequence, end: int) -> tuple[list[int], int]:
        """As SequenceBlocks.part, by the log."""
        del end
        starts = self._starts.get(int(seq.state.request.request_id) << SAMPLE_BITS | seq.sample_index)
        found = starts.popleft() - seq.computed if starts else 0
        part = found if 0 < found < self._block_size else 0
        return [-1] * len(seq.table.blocks), part  # nothing is copied

    def plan(self, step: rows.Step) -> None:
        """The step to come."""
        self._step = step

    def begin(self, out: SchedulerOutput) -> None:
        """Cut the rows to the drafts that there were."""
        assert self._step is not None
        self._out = out
        for new in out.new:
            key = int(new.request_id) << SAMPLE_BITS | new.sample_index
            self._keys[new.seq_id] = key
            self._made.setdefault(key, new.prompt_len)
        for row, count in self._notes(rows.DRAFTS):
            one = out.scheduled[row]
            surplus = one.drafts - count
            if surplus > 0:
                del one.token_ids[len(one.token_ids) - surplus :]
                one.logits -= surplus

    def forward(self, out: SchedulerOutput, _beside: SchedulerOutput | None = None) -> None:
        """Nothing is computed."""
        self._out = out

    def sample(self, _masks: Masks | None = None) -> StepOutput:
        """The result by the log."""
        assert self._step is not None
        assert self._out is not None
        out, flat = self._out, self._step.rows
        count = len(out.scheduled)
        stops, made = dict(self._notes(rows.STOPPED)), self._made
        tokens: list[list[int]] = []
        for i, row in enumerate(out.scheduled):
            key = self._keys[row.seq_id]
            accepted = flat[4 * i + 3] if 4 * i + 3 < len(flat) else int(row.sample)
            at = made[key]
            new = self._lines.next(key, at, stops.get(i, accepted))
            if i in stops:
                new[-1] = _END
            made[key] = at + len(new)
            tokens.append(new)
        failed = {i: why for note, why in _FAILURES.items() for i, _ in self._notes(note)}
        result = StepOutput(tokens, [None] * count, [self._scored(i) for i in range(count)], failed)
        result.late = {i for i, _ in self._notes(rows.LATE)}
        result.complete = {i for i, _ in self._notes(rows.COMPLETE)}
        result.pooled = {i: b"" for i, _ in self._notes(rows.POOLED)}
        for i, proposed in self._notes(rows.PROPOSED):
            key = self._keys[out.scheduled[i].seq_id]
            result.drafts[i] = self._lines.next(key, made[key], proposed)
        return result

    def count(self, added: Mapping[int, list[int]]) -> None:
        """Tokens that a grammar adds are in the log."""

    def _notes(self, what: int) -> Iterator[tuple[int, int]]:
        assert self._step is not None
        assert self._out is not None
        notes = self._step.notes
        for i in range(0, len(notes), 3):
            if notes[i + 1] == what and notes[i] < len(self._out.scheduled):
                yield notes[i], notes[i + 2]

    def _scored(self, index: int) -> LogprobTable | None:
        assert self._out is not None
        row = self._out.scheduled[index]
        if not row.prompt_logprobs:
            return None
        key = self._keys[row.seq_id]
        length, end = len(self._lines.prompt(key >> SAMPLE_BITS)), row.start + len(row.token_ids)
        wanted = min(end, length - 1) - max(row.start, length - 1 - self.scored[key >> SAMPLE_BITS])
        return LogprobTable(b"", b"", bytes(4 * wanted), bytes(8 * wanted))


@dataclass(slots=True)
class _Clock:
    """Shows what was read in the steps of a log."""

    readings: list[int] = field(default_factory=list)

    def __call__(self) -> int:
        return self.readings.pop(0) if self.readings else time.monotonic_ns()


def replay(log: Log, *, core: EngineCore | None = None, speed: float = 0.0) -> Replayed:
    """Run a log again; with `core`, on that engine. `speed` 1 keeps the times between steps, 0 waits for nothing.

    Raises ReplayError for what a replay cannot do.
    """
    opened = _check(log, real=core is not None)
    config = config_of(opened)
    lines, begun = _Lines(log.rows, config.block_size), time.monotonic()
    worker = None
    if core is None:
        worker = _ScriptedWorker(lines, config.block_size)
        core = _scripted(opened, config, worker)
        if not opened.prompts:
            worker.expect(log.rows)
            core.scheduler.part = worker.part
    run = _Run(core, lines, worker, config, log.rows)
    found = run.found
    first, started = opened.at, time.monotonic_ns()
    seen: list[rows.Step] = []
    for row in log.rows:
        if speed and isinstance(row, rows.Step):
            due = started + int((row.at - first) / speed)
            time.sleep(max(0.0, (due - time.monotonic_ns()) / 1e9))
        run.take(row, seen)
        if found.difference:
            break
    found.digest, found.seconds = schedule_digest(seen), time.monotonic() - begun
    found.unfinished = core.scheduler.num_running + core.scheduler.num_waiting
    return found


def config_of(opened: rows.Opened) -> SchedulerConfig:
    """The options of a log's scheduler. Raises ReplayError for those of another version."""
    options = dict(opened.options)
    try:
        groups = tuple(
            _GROUPS[name](
                **{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
            )
            for name, given in options.pop("groups")
        )
        options["class_policies"] = tuple(options["class_policies"])
        return SchedulerConfig(**options, groups=groups)
    except (KeyError, TypeError, ValueError) as error:
        raise ReplayError(f"the log's options are not those of this version: {error}") from None


def _check(log: Log, *, real: bool) -> rows.Opened:
    opened = log.rows[0] if log.rows else None
    if not isinstance(opened, rows.Opened):
        raise ReplayError("the log is empty" if opened is None else "the log does not begin with its options")
    if opened.part:
        raise ReplayError(f"the log's first {opened.part} files are missing: what was cached is unknown")
    if opened.swap:
        raise ReplayError("swap_space: copies of blocks are not replayed")
    for row in log.rows:
        if isinstance(row, rows.Step) and rows.TREE in row.notes[1::3]:
            raise ReplayError(f"step {row.number}: drafts in trees are not replayed")
        if isinstance(row, rows.Arrived):
            refused = {"beams", "soft", "given"} | (
                {"grammar", "adapter", "negative", "other parameters"} if real else set()
            )
            if bad := refused.intersection(row.traits):
                raise ReplayError(f"request {row.request_id}: {min(bad)} cannot be replayed")
    if real and not opened.prompts:
        raise ReplayError(
            "the log has no prompts: replay it without a model, or record with --record-prompts"
        )
    return opened


def _scripted(opened: rows.Opened, config: SchedulerConfig, worker: _ScriptedWorker) -> EngineCore:
    costs = StepCostModel(opened.costs) if any(opened.costs) else StepCostModel()
    kind = Scheduler if opened.batching == "continuous" else WholeBatchScheduler
    scheduler = kind(config, random.Random(0), costs=costs)
    classes = parse_classes(tuple(opened.classes.split()))
    controller = StepController(scheduler, classes, costs) if classes else None
    return EngineCore(scheduler, worker, costs=costs, controller=controller)


class _Run:
    """One replay."""

    def __init__(
        self,
        core: EngineCore,
        lines: _Lines,
        worker: _ScriptedWorker | None,
        config: SchedulerConfig,
        log: list[AnyRow],
    ) -> None:
        self._core, self._lines, self._worker, self.found = core, lines, worker, Replayed()
        self._clock = _Clock()
        self._tap = _Tap(config)
        core.recorder = self._tap
        if worker is not None:
            core.clock = self._clock
        self._asked: dict[int, rows.Arrived] = {}
        self._seeds: dict[int, int] = {}
        for step in log:
            for i in range(0, len(step.started) if isinstance(step, rows.Step) else 0, 3):
                key, _, seed = step.started[i : i + 3]  # type: ignore[union-attr]
                self._seeds.setdefault(key >> SAMPLE_BITS, seed)
        self._accounts = _accounts(log)
        self._output: dict[tuple[str, int], list[int]] = {}

    def take(self, row: AnyRow, seen: list[rows.Step]) -> None:
        """Do what a row says, and compare."""
        core, found = self._core, self.found
        match row:
            case rows.Arrived():
                self._asked[row.number] = row
            case rows.Queued() if row.number in self._asked:
                self._tap.number(row.number)
                self._add(self._request(self._asked[row.number]))
                found.requests += 1
            case rows.Aborted():
                core.abort(str(row.number))
            case rows.Finished():
                core.finish(str(row.number), row.sample)
            case rows.Reconfigured():
                core.configure(_live_config(row))
            case rows.Step():
                self._step(row, seen)
            case rows.Ended() if row.chain.tokens and self._worker is None:
                self._compare_tokens(row)
            case _:
                pass

    def _add(self, request: Request) -> None:
        if self._worker is None:
            self._core.add(request)
        else:  # grammars and adapters were ready
            self._tap.arrived(request)
            self._core.scheduler.add(request)
            self._tap.queued(request.request_id)

    def _step(self, step: rows.Step, seen: list[rows.Step]) -> None:
        core, found = self._core, self.found
        if not core.has_work():
            found.difference = f"step {step.number}: the log has a step, and nothing is left to run"
            return
        if self._worker is not None:
            self._worker.plan(step)
            at = step.at
            self._clock.readings = [at, at + step.scheduled, at + step.executed, at + step.updated]
        try:
            events = core.step()
        except (ValueError, KeyError, IndexError) as error:
            found.difference = f"step {step.number}: {error}"
            return
        for event in events:
            self._output.setdefault((event.request_id, event.sample_index), []).extend(event.new_token_ids)
        made = self._tap.last
        if made is None:
            found.difference = f"step {step.number}: no rows were scheduled"
            return
        for (what, then), now in zip(schedule_of(step).items(), schedule_of(made).values(), strict=True):
            if then != now:
                found.difference = f"step {step.number}: {what}: {_told(then)} then, {_told(now)} now"
                return
        found.steps += 1
        seen.append(made)

    def _compare_tokens(self, row: rows.Ended) -> None:
        then, now = list(array("i", row.chain.tokens)), self._output.get((str(row.number), row.sample), [])
        self.found.compared_tokens += len(then)
        if then[: len(now)] != now[: len(then)]:
            at = next(i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b)
            who = f"request {self._asked[row.number].request_id}, sample {row.sample}"
            self.found.difference = f"{who}: token {at} of its output was {then[at]}, and is {now[at]} now"

    def _request(self, row: rows.Arrived) -> Request:
        real = self._worker is None
        names = (
            PARAMETERS
            if real
            else {"n": 0, "max_tokens": 0, "prompt_logprobs": 0, "prompt_logprobs_start": 0}
        )
        params: dict[str, Any] = {
            name: int(value) if PARAMETERS[name].kind is int else value
            for name, value in row.params.items()
            if name in names
        }
        if not real and row.negative_tokens:
            params["guidance_scale"] = row.params.get("guidance_scale", 2.0)
        if real:
            params["seed"] = self._seeds.get(row.number)
        made = SamplingParams(
            **params, stop_token_ids=row.stops if real else (), ignore_eos="known length" in row.traits
        )
        prompt = TokenIds(self._lines.prompt(row.number))
        if self._worker is not None:
            self._worker.scored[row.number] = made.scored_tokens(len(prompt))
        tenant, namespace, adapter = row.domain
        account = self._accounts.get(row.account, row.account)
        return Request(
            request_id=str(row.number),
            prompt_token_ids=prompt,
            params=made,
            arrival=row.arrival,
            priority=row.priority,
            namespace=namespace,
            tenant=tenant,
            eos_token_ids=() if real else (_END,),
            stepwise="stepwise" in row.traits,
            pooling="pooling" in row.traits,
            grammar=Grammar("", b"") if "grammar" in row.traits else None,
            adapter=adapter,
            negative_prompt=TokenIds([self._lines.fresh() for _ in range(row.negative_tokens)])
            if row.negative_tokens
            else None,
            terms=ServiceTerms(
                account=account,
                weight=row.weight,
                service_class=row.service_class,
                due=row.due,
                expected_tokens=row.expected_tokens,
            ),
        )


def _live_config(row: rows.Reconfigured) -> LiveEngineConfig:
    """Raises ReplayError for options of another version."""
    try:
        return LiveEngineConfig(**(row.options | {"slo": tuple(row.options["slo"])}))
    except (KeyError, TypeError) as error:
        raise ReplayError(f"the configuration that was changed is not of this version: {error}") from None


def _accounts(log: list[AnyRow]) -> dict[str, str]:
    """Names for accounts that have the order of the real ones."""
    order: list[str] = []
    for row in log:
        if isinstance(row, rows.Arrived) and 0 <= row.place <= len(order):
            order.insert(row.place, row.account)
    return {account: f"{place:08}" for place, account in enumerate(order)}


def _told(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
