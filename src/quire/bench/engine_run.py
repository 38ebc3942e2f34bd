"""An engine in this process that runs step by step and records every step.

It is the engine of `quire generate`. Only its worker is wrapped, to record the rows of each step, from which
program/cost computes the work of the step. The time of recording is excluded.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from quire.bench.bounds import step_bound
from quire.bench.limits import LimitsProbe, LimitsSample, mean
from quire.bench.results import Better, Metric, metric
from quire.config.schema import EngineConfig
from quire.core.scheduler import Scheduler
from quire.engine.api import Ask
from quire.engine.build.assemble import Built, build
from quire.engine.build.opening import Model, open_model
from quire.engine.core import EngineCore, StepExecutor
from quire.engine.sync_engine import SyncEngine
from quire.executor.base import Inspectable
from quire.executor.plans import PlanCounts
from quire.outputs import RequestOutput
from quire.planner import shapes
from quire.program.cost import Row, step_cost
from quire.program.program import Program
from quire.records import dataclass
from quire.speculate.speculation import Speculation
from quire.types import SamplingParams, ScheduledSeq, SchedulerOutput, StepOutput
from quire.util.progress import ByteProgress
from quire.worker.worker import Masks

Figures = dict[str, tuple[str, Better, str]]  # name -> unit, which way is better, definition
Tables = dict[str, list[dict[str, Any]]]
NATIVE_PHASES = ("forward", "sample")  # the parts of a step that are native calls


@dataclass(slots=True)
class EngineStep:
    """One step of an engine: its rows, how many positions need logits, and the seconds measured around it.

    `drafts` are the drafts of rows that had some, and how many of them were right, by row; `made` the tokens sampled.
    `wall` is the whole step including its outputs, `phases` its parts, `begin` seconds from the start of the run.
    """

    rows: list[Row]
    logit_rows: int
    phases: dict[str, float]
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)
    made: int = 0
    begin: float = 0.0
    wall: float = 0.0
    op_seconds: list[float] = field(default_factory=list)  # of each op, and of waiting in it, if profiled
    op_waited: list[float] = field(default_factory=list)

    @property
    def native(self) -> float:
        """Seconds in the native calls."""
        return sum(self.phases.get(name, 0.0) for name in NATIVE_PHASES)

    @property
    def engine(self) -> float:
        """Seconds outside the native calls and of making drafts."""
        return self.wall - self.native - self.phases.get("draft", 0.0)

    @property
    def tokens(self) -> int:
        return sum(row.query_len for row in self.rows)

    @property
    def decoding(self) -> list[Row]:
        """The rows that are one known token and drafts after it."""
        found = []
        for i, row in enumerate(self.rows):
            drafted, _ = self.drafts.get(i, (0, 0))
            if row.query_len == 1 + drafted and row.context_len > 0:
                found.append(row)
        return found

    @property
    def kind(self) -> str:
        """ "decode" if every row is one token that gives the next, drafts aside, "prefill" if none is, else "mixed"."""
        decoding = len(self.decoding)
        return "decode" if decoding == len(self.rows) else "mixed" if decoding else "prefill"


@dataclass(slots=True)
class EngineRun:
    """One run of requests to their end. Times are seconds from `start` (time.perf_counter)."""

    start: float
    seconds: float
    steps: list[EngineStep]
    outputs: list[RequestOutput]

    @property
    def output_tokens(self) -> int:
        return sum(output.usage.completion_tokens for output in self.outputs)

    @property
    def prompt_tokens(self) -> int:
        return sum(output.usage.prompt_tokens for output in self.outputs)

    def first_tokens(self) -> list[float]:
        """Seconds from each request's arrival to its first token."""
        return [o.timings.first_token - o.timings.arrival for o in self.outputs]


@dataclass(slots=True)
class _Recorder:
    """A worker that records its inputs."""

    worker: StepExecutor
    profiled: Inspectable | None = None
    scheduled: list[ScheduledSeq] = field(default_factory=list)
    steps: list[EngineStep] = field(default_factory=list)
    noting: float = 0.0
    begun: float = 0.0
    drafting: float = 0.0

    @property
    def plans(self) -> PlanCounts:
        return self.worker.plans

    def count(self, added: Mapping[int, list[int]]) -> None:
        self.worker.count(added)

    def begin(self, out: SchedulerOutput) -> None:
        self.worker.begin(out)
        self.begun = time.perf_counter()

    def forward(self, out: SchedulerOutput, beside: SchedulerOutput | None = None) -> None:
        self.drafting = time.perf_counter() - self.begun
        self.scheduled = out.scheduled
        self.worker.forward(out, beside)

    def sample(self, masks: Masks | None = None) -> StepOutput:
        result = self.worker.sample(masks)
        start = time.perf_counter()
        rows = [Row(len(item.token_ids), item.start) for item in self.scheduled]
        wanted = sum(item.logits for item in self.scheduled)
        drafts = {
            i: (item.drafts, max(0, len(result.token_ids[i]) - 1))
            for i, item in enumerate(self.scheduled)
            if item.drafts
        }
        phases = {**result.seconds, "draft": self.drafting} if drafts else dict(result.seconds)
        step = EngineStep(rows, wanted, phases, drafts, sum(map(len, result.token_ids)))
        if self.profiled is not None:
            step.op_seconds, step.op_waited = self.profiled.take_profile()
        self.steps.append(step)
        self.noting = time.perf_counter() - start
        return result


class BenchEngine:
    """Builds the engine of a model and runs requests on it. A context manager.

    `model` is a folder, a hub name, or "shape:NAME" for random weights of a released shape. Without `tokenizer`, tokens
    are not converted to text. `profile` measures every op of every step.
    """

    def __init__(
        self,
        model: str,
        asked: EngineConfig,
        *,
        tokenizer: bool = True,
        progress: bool = False,
        profile: bool = False,
    ) -> None:
        opened, asked = open_bench_model(model, asked, tokenizer=tokenizer)
        with ByteProgress("loading weights", "saving packed weights", enabled=progress) as bar:
            built = build(opened, asked, bar)
        self._recorder = _Recorder(built.core.worker)
        if profile:
            built.executor.profile(True)
            self._recorder.profiled = built.executor
        self._use(built, built.core.scheduler, built.core.speculation)

    def _use(self, built: Built, scheduler: Scheduler, speculation: Speculation | None) -> None:
        grammars, costs = built.core.grammars, built.core.costs
        core = EngineCore(scheduler, self._recorder, None, grammars, speculation, costs=costs)
        self.built = replace(built, core=core)
        self.engine = SyncEngine(self.built)

    def speculating(self, speculation: Speculation | None) -> BenchEngine:
        """The same engine with other drafts, or with none, and a scheduler of its own: one of them works at a time."""
        other, config = copy.copy(self), self.built.core.scheduler.config
        drafts = 0 if speculation is None else config.max_draft_tokens
        # What one scheduler knows of the contents of blocks, the other one does not.
        config = replace(config, max_draft_tokens=drafts, enable_prefix_caching=False)
        other._use(self.built, Scheduler(config), speculation)
        return other

    @property
    def program(self) -> Program:
        return self.built.program

    def __enter__(self) -> BenchEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.built.close()

    def run(
        self,
        prompts: Sequence[list[int]],
        output_lens: Sequence[int],
        concurrency: int | None = None,
        temperature: float = 0.0,
        ahead: int = 0,
    ) -> EngineRun:
        """Run prompts to their end; at most `concurrency` are in the engine at once (None: all). The first is so many
        steps ahead of the others."""
        recorder, engine = self._recorder, self.engine
        recorder.steps = []
        waiting = list(zip(prompts, output_lens, strict=True))[::-1]
        outputs: list[RequestOutput] = []
        running = 0
        start = time.perf_counter()
        while waiting or engine.has_work():
            while waiting and (concurrency is None or running < concurrency):
                if running and len(recorder.steps) < ahead:
                    break
                prompt, length = waiting.pop()
                params = SamplingParams(temperature=temperature, seed=0, max_tokens=length, ignore_eos=True)
                outputs.append(engine.add(Ask(prompt=prompt, params=params)))
                running += 1
            begin, noted = time.perf_counter(), len(recorder.steps)
            deltas = engine.step()
            wall = time.perf_counter() - begin
            if len(recorder.steps) > noted:
                step = recorder.steps[-1]
                step.begin, step.wall = begin - start, wall - recorder.noting
                record = self.built.core.records[-1]
                step.phases |= {"schedule": record.schedule_seconds, "update": record.update_seconds}
            running -= sum(delta.finish_reason is not None for delta in deltas)
        seconds, steps, recorder.steps = time.perf_counter() - start, recorder.steps, []
        self.built.core.step()  # an empty one, which lets the worker forget the last sequences
        return EngineRun(start, seconds, steps, outputs)


def open_bench_model(model: str, asked: EngineConfig, *, tokenizer: bool) -> tuple[Model, EngineConfig]:
    """Open a model and return it with its config; a shape gets random weights."""
    if not model.startswith(shapes.PREFIX):
        return open_model(model, tokenizer=tokenizer), asked
    with tempfile.TemporaryDirectory() as folder:
        written = shapes.write(model.removeprefix(shapes.PREFIX), Path(folder))
        return open_model(written, tokenizer=False), asked.replace(load_format="random")


class Prompts:
    """Random token ids, never the same prompt twice, so that there are no prefix hits."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab, self._random = vocab, np.random.default_rng(seed)

    def make(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` tokens."""
        return [self._random.integers(0, self._vocab, length).tolist() for _ in range(count)]

    def lengths(self, count: int, mean: int, ratio: float) -> list[int]:
        """Integers from the uniform distribution over mean · (1 - ratio) … mean · (1 + ratio), at least 1."""
        low, high = round(mean * (1 - ratio)), round(mean * (1 + ratio))
        return [max(1, int(n)) for n in self._random.integers(low, high + 1, count)]


@dataclass(frozen=True, slots=True)
class Judged:
    """Steps of one kind: seconds, the least possible seconds, bytes moved and operations computed."""

    steps: int
    tokens: int
    seconds: float
    bound_seconds: float
    memory_seconds: float
    compute_seconds: float
    moved: int
    flops: int
    engine_seconds: float

    @property
    def share(self) -> float | None:
        """The sum of every step's bound, divided by the seconds of the steps."""
        return self.bound_seconds / self.seconds if self.seconds else None

    @property
    def bound(self) -> str:
        """The limit that is nearer over all steps."""
        return "compute" if self.compute_seconds > self.memory_seconds else "memory"


def judge(program: Program, steps: Sequence[EngineStep], limits: LimitsSample) -> Judged:
    """Compare steps with the limits measured around them."""
    bound = memory = compute = 0.0
    moved = flops = 0
    for step in steps:
        cost = step_cost(program, step.rows, step.logit_rows)
        computing, moving = step_bound(program, cost, limits.bandwidth, limits.compute)
        total = cost.total
        bound, memory, compute = bound + max(computing, moving), memory + moving, compute + computing
        moved += total.weight_bytes + total.kv_read_bytes + total.kv_written_bytes
        flops += total.flops
    return Judged(
        steps=len(steps),
        tokens=sum(step.tokens for step in steps),
        seconds=sum(step.wall for step in steps),
        bound_seconds=bound,
        memory_seconds=memory,
        compute_seconds=compute,
        moved=moved,
        flops=flops,
        engine_seconds=sum(step.engine for step in steps),
    )


def iterations(
    probe: LimitsProbe, count: int, warmup: int, run: Callable[[bool], EngineRun]
) -> Iterator[tuple[int, EngineRun, LimitsSample]]:
    """Runs with their numbers and the limits sampled just before and after, once `run(True)` has warmed up."""
    for _ in range(warmup):
        run(True)
    for number in range(count):
        before = probe.sample()
        one = run(False)
        yield number, one, mean(before, probe.sample())


def metrics_of(rows: Sequence[dict[str, Any]], figures: Figures) -> dict[str, Metric]:
    """Metrics over the iterations."""
    return {
        name: metric([row[name] for row in rows if row[name] is not None], unit, better)
        for name, (unit, better, _) in figures.items()
    }


def settings(asked: Any, engine: BenchEngine) -> dict[str, Any]:
    """The requested options, and the choices of the engine."""
    config = engine.built.config
    return {
        **asdict(asked),
        "weights": config.quantized or config.weights,
        "kv": config.kv,
        "threads": config.threads,
        "isa": engine.built.executor.isa,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "architecture": engine.built.model.facts.architecture,
    }
