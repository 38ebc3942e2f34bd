"""A tiny model with random weights under a real scheduler, worker and sampler: requests in, exact bits out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from helpers.backends import NATIVE, Backend
from helpers.specs import F32, decoder_spec
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.tier import Name
from quire.engine.core import Grammars
from quire.executor.base import U8, Executor, Limits
from quire.program.lower import lower
from quire.program.program import Program
from quire.speculate.proposer import DraftTree
from quire.types import DRAFT, Request, SamplingParams, SchedulerOutput, SeqEvent, StepOutput
from quire.worker.slots import EmbeddingStore
from quire.worker.worker import Worker

VOCAB, LENGTH, BLOCK = 100, 80, 16
PROGRAM = lower(decoder_spec(VOCAB, 48, 40, (4, 2, 16), [0, 24], tied=True, qk_norm=True), F32)


@dataclass
class Made:
    """What a sample gave: tokens, every logprob to the last bit, why it ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None

    def take(self, event: SeqEvent) -> None:
        self.tokens += event.new_token_ids
        self.logprobs += [c.logprob for position in event.logprobs or () for c in position]
        self.reason = event.finish_reason


def requests(count: int, **params: object) -> list[Request]:
    """Prompts of unlike lengths, some with a prefix in common; penalties look at every token so far."""
    random_ = np.random.default_rng(7)
    common = random_.integers(0, VOCAB, 40).tolist()
    made = []
    for number in range(count):
        own = random_.integers(0, VOCAB, 5 + 3 * number).tolist()
        asked: dict[str, object] = {
            "temperature": 0.8,
            "seed": number,
            "logprobs": 2,
            "max_tokens": 8 + number % 7,
        }
        if number % 3 == 1:
            asked |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 3}
        if number % 4 == 2:
            asked |= {"n": 2}
        wanted = SamplingParams(**(asked | params))  # type: ignore[arg-type]
        prompt = common[: 16 * (number % 3)] + own
        made.append(
            Request(
                request_id=str(number), prompt_token_ids=prompt, params=wanted,
                arrival=float(number), eos_token_ids=(number % 5,),
            )
        )  # fmt: skip
    return made


def executor_of(backend: Backend, program: Program = PROGRAM) -> Executor:
    executor = backend.make(program)
    weights = np.random.default_rng(0)
    for param in program.params:
        offset = 0
        for part in param.parts:
            shape = (part.rows,) if param.kind == "vector" else (part.rows, part.cols)
            executor.put(param, offset, (weights.standard_normal(shape) * 0.3).astype(np.float32), "F32")
            offset += part.rows
    return executor


class RamTier:
    """A tier in memory: what the scheduler asks and what the worker copies in one. Every seventh content is lost."""

    fingerprint = b"tiny"

    def __init__(self) -> None:
        self.names: set[tuple[bytes, int]] = set()
        self.contents: dict[tuple[bytes, int], U8] = {}
        self.asked = self.got = 0

    def published(self, name: Name, block: int, tenant: str) -> None:
        pass

    def moved(self, name: Name, block: int) -> None:
        pass

    def saves(self, *, idle: bool) -> list[tuple[Name, int]]:
        return []

    def withdrawn(self, name: Name, *, offered: bool) -> bool:
        if offered:
            self.names.add(name)
        return offered

    def holds(self, name: Name) -> bool:
        return name in self.names

    def copy_seconds(self, name: Name) -> float:
        return 0.0

    work_seconds = copy_seconds

    def put(self, name: Name, content: U8) -> None:
        self.contents[name] = content

    def comes(self, block: int, name: Name) -> bool:
        return False

    def arrived(self, most: int) -> list[tuple[int, U8 | None]]:
        return []

    def spent(self) -> float:
        return 0.0

    def get(self, name: Name) -> U8 | None:
        self.asked += 1
        if self.asked % 7 == 0:
            return None
        self.got += 1
        return self.contents[name]


Key = tuple[str, int]  # request id and sample index
Propose = Callable[[Key, int], list[int]]
Plant = Callable[[Key, int], DraftTree]


def draft_limits(config: SchedulerConfig) -> Limits:
    """Those of a worker that runs trees of drafts, if there are drafts."""
    branches = max(0, config.max_draft_tokens - 1)
    return Limits(
        config.max_num_batched_tokens, config.max_num_seqs, config.max_num_seqs + config.max_draft_tokens,
        config.max_model_len, config.num_blocks, config.block_size, branches, branches * len(config.groups),
    )  # fmt: skip


class Rig:
    """A scheduler and a worker. `propose(sample, outputs)` gives drafts for a sample of so many outputs, `plant` a tree
    of them, made when the step is about to run; `grammars` masks, which a thread fills while the program runs."""

    def __init__(
        self,
        backend: Backend = NATIVE,
        propose: Propose | None = None,
        tier: RamTier | None = None,
        grammars: Grammars | None = None,
        embeddings: EmbeddingStore | None = None,
        plant: Plant | None = None,
        program: Program = PROGRAM,
        **options: object,
    ) -> None:
        asked: dict[str, object] = {
            "num_blocks": 40, "block_size": BLOCK, "max_num_seqs": 4, "max_num_batched_tokens": 48,
            "max_model_len": LENGTH, "groups": program.cache_groups,
        }  # fmt: skip
        self.config = config = SchedulerConfig(**(asked | options))  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, random.Random(0), tier)
        executor = executor_of(backend, program)
        self.worker = Worker(executor, draft_limits(config), tier, embeddings)
        self.propose, self.plant, self.grammars = propose, plant, grammars
        self.drafts = self.accepted = self.steps = 0
        self.trees: dict[int, DraftTree] = {}
        self.shrunk = 0
        self.seqs: dict[int, tuple[Key, int]] = {}  # and the prompt's length

    def execute(self, out: SchedulerOutput) -> StepOutput:
        self.steps += 1
        for row in out.scheduled:
            if row.depth:
                tree = self.trees[row.seq_id].within(row.drafts, row.depth)
                self.shrunk += len(tree.token_ids) < len(self.trees[row.seq_id].token_ids)
                row.token_ids[-row.drafts :] = tree.token_ids
                row.logits, row.parents = 1 + len(tree.token_ids), tree.parents
        if self.grammars:
            self.grammars.begin(out)
        self.worker.begin(out)
        self.worker.forward(out)
        result = self.worker.sample(self.grammars.masks() if self.grammars else None)
        if self.grammars and (added := self.grammars.advance(out, result)):
            self.worker.count(added)
        for new in out.new:
            self.seqs[new.seq_id] = (new.request_id, new.sample_index), new.prompt_len
        for i, row in enumerate(out.scheduled):
            if row.drafts:
                self.drafts += row.drafts
                self.accepted += min(row.drafts, len(result.token_ids[i]) - 1)
            if not result.token_ids[i]:
                continue
            key, prompt = self.seqs[row.seq_id]
            outputs = row.start + len(row.token_ids) - row.drafts + len(result.token_ids[i]) - prompt
            if self.propose and (drafts := self.propose(key, outputs)):
                result.drafts[i] = drafts
            if self.plant and (tree := self.plant(key, outputs)).token_ids:
                self.trees[row.seq_id] = tree
                result.drafts[i], result.depths[i] = [DRAFT] * len(tree.token_ids), max(tree.depths())
        return result

    def run(self, asked: Sequence[Request]) -> dict[Key, Made]:
        """Every request to its end, one joining in every other step. A second step is scheduled while one runs."""
        scheduler, queue, steps = self.scheduler, list(asked), 0
        made = {(r.request_id, index): Made() for r in asked for index in range(r.params.n)}
        flights: deque[tuple[SchedulerOutput, Future[StepOutput]]] = deque()
        with ThreadPoolExecutor(1) as thread:
            while queue or scheduler.has_work() or flights:
                if queue and steps % 2 == 0:
                    scheduler.add(queue.pop(0))
                steps += 1
                if scheduler.has_work():
                    out = scheduler.schedule()
                    flights.append((out, thread.submit(self.execute, out)))
                if len(flights) == self.config.steps_in_flight or not scheduler.has_work():
                    out, future = flights.popleft()
                    for event in scheduler.update(out, future.result()):
                        made[event.request_id, event.sample_index].take(event)
                scheduler.audit()
        return made


def check_same(found: dict[Key, Made], expected: dict[Key, Made], backend: Backend = NATIVE) -> None:
    """Equal to the last bit; torch, which promises no bits, may be as far off as its tolerance."""
    for key, made in expected.items():
        assert (found[key].tokens, found[key].reason) == (made.tokens, made.reason)
        tolerance = 0 if backend is NATIVE else backend.tolerance
        np.testing.assert_allclose(found[key].logprobs, made.logprobs, rtol=0, atol=tolerance)
