"""Random lives of an engine whose worker makes tokens up, on a clock of its own: their logs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from quire.core.controller import StepController
from quire.core.cost_model import StepCostModel
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.core import EngineCore
from quire.objectives import ServiceTerms, parse_classes
from quire.steplog.log_files import LogFile
from quire.steplog.recorder import Recorder
from quire.types import FinishReason, Request, SamplingParams, SchedulerOutput, StepOutput, TokenIds

MS = 1_000_000


@dataclass
class Clock:
    """Nanoseconds; every reading costs some."""

    now: int = 10**12
    cost: int = 1000

    def __call__(self) -> int:
        self.now += self.cost
        return self.now


@dataclass
class MadeUpWorker:
    """Tokens by chance. `seconds` of a step go by on the clock."""

    rng: random.Random
    clock: Clock
    drafts: bool = False
    failures: float = 0.0
    step_ms: float = 1.0
    token_ms: float = 0.05
    out: Any = None
    seqs: dict[int, tuple[str, int]] = field(default_factory=dict)
    plans: Any = None

    def begin(self, out: SchedulerOutput) -> None:
        self.out = out

    def forward(self, out: SchedulerOutput, beside: object = None) -> None:
        self.out = out
        tokens = sum(len(row.token_ids) for row in out.scheduled)
        self.clock.now += int(MS * (self.step_ms + self.token_ms * tokens) * self.rng.uniform(0.9, 1.1))

    def sample(self, masks: object = None) -> StepOutput:
        rows, rng = self.out.scheduled, self.rng
        tokens: list[list[int]] = []
        failed: dict[int, FinishReason] = {}
        for i, row in enumerate(rows):
            new = [rng.randrange(1, 40)] if row.sample else []
            if row.drafts:
                right = rng.randint(0, row.drafts)
                new = [*row.token_ids[len(row.token_ids) - row.drafts :][:right], *new]
            if new and rng.random() < self.failures:
                failed[i], new = FinishReason.ERROR, []
            tokens.append(new)
        result = StepOutput(tokens, [None] * len(rows), [None] * len(rows), failed)
        if self.drafts:
            for i, new in enumerate(tokens):
                if new and rng.random() < 0.5:
                    result.drafts[i] = [rng.randrange(1, 40) for _ in range(rng.randint(1, 3))]
        return result

    def count(self, added: object) -> None: ...


def engine(
    seed: int,
    *,
    file: LogFile | None = None,
    prompts: bool = False,
    slo: tuple[str, ...] = (),
    **options: Any,
) -> tuple[EngineCore, MadeUpWorker, Clock]:
    rng, clock = random.Random(seed), Clock()
    values: dict[str, Any] = {
        "num_blocks": 40,
        "block_size": 4,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 24,
        "max_model_len": 80,
    }
    config = SchedulerConfig(**(values | options))
    worker = MadeUpWorker(rng, clock, drafts=config.max_draft_tokens > 0)
    costs = StepCostModel()
    scheduler = Scheduler(config, random.Random(seed), costs=costs)
    classes = parse_classes(slo)
    controller = StepController(scheduler, classes, costs) if classes else None
    core = EngineCore(scheduler, worker, costs=costs, controller=controller)
    core.clock = clock
    recorder = Recorder(
        config,
        file=file,
        prompts=prompts,
        costs=costs.weights,
        classes=" ".join(slo),
        clock=clock,
        ring_bytes=2**26,
    )
    core.record(recorder)
    return core, worker, clock


def request(core: EngineCore, name: str, prompt: list[int], clock: Clock, **params: Any) -> Request:
    terms = ServiceTerms(service_class=params.pop("service_class", 0), account=params.pop("account", ""))
    arrival = params.pop("arrival", None)
    facts = {key: params.pop(key) for key in ("tenant", "namespace", "priority") if key in params}
    made = Request(
        request_id=name,
        prompt_token_ids=TokenIds(prompt),
        params=SamplingParams(**params),
        arrival=clock() / 1e9 if arrival is None else arrival,
        eos_token_ids=(3,),
        terms=terms,
        **facts,
    )
    core.add(made)
    return made


def storm(seed: int, count: int = 40, **options: Any) -> tuple[EngineCore, list[str]]:
    """Run requests that come, go and share prefixes; returns the engine and the names of the requests."""
    rng = random.Random(f"storm {seed}")
    core, worker, clock = engine(seed, **options)
    worker.failures = rng.choice([0.0, 0.0, 0.01])
    bases = [[rng.randrange(1, 40) for _ in range(40)] for _ in range(3)]
    names: list[str] = []
    while len(names) < count or core.has_work():
        if len(names) < count and (rng.random() < 0.5 or not core.has_work()):
            base = rng.choice(bases)[: rng.randint(1, 40)]
            prompt = base + [rng.randrange(1, 40) for _ in range(rng.randint(0, 10))]
            names.append(f"r{len(names)}")
            request(
                core, names[-1], prompt, clock,
                max_tokens=rng.randint(1, 25), n=rng.choice([1, 1, 1, 3]), tenant=rng.choice(["", "a", "b"]),
                namespace=rng.choice(["", "", "x"]), priority=rng.choice([0, 0, 1]),
                service_class=0, account=rng.choice(["", "a", "b"]),
            )  # fmt: skip
        if rng.random() < 0.05 and names:
            core.abort(rng.choice(names))
        if rng.random() < 0.05 and names:
            core.finish(rng.choice(names), rng.randint(0, 2))
        if core.has_work():
            core.step()
        clock.now += rng.choice([0, 0, 1000, 50_000])
    return core, names
