"""A scheduler of few blocks, and steps of it without a worker."""

from __future__ import annotations

import random
from typing import Any

from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.types import FinishReason, Request, SamplingParams, SchedulerOutput, SeqEvent, StepOutput


def make(**changes: Any) -> Scheduler:
    return Scheduler(config(**changes), random.Random(1))


def config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "num_blocks": 32,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
    }
    return SchedulerConfig(**(values | changes))


def ask(name: str, prompt: list[int], *, priority: int = 0, arrival: float = 0.0, **params: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        arrival=arrival,
        priority=priority,
        eos_token_ids=(0,),
    )


def run(scheduler: Scheduler, token: int = 7) -> tuple[SchedulerOutput, list[SeqEvent]]:
    """One step in which every sampling row gives `token`."""
    out = scheduler.schedule()
    return out, scheduler.update(out, answer(out, [[token] if row.sample else [] for row in out.scheduled]))


def answer(out: SchedulerOutput, token_ids: list[list[int]], failed: tuple[int, ...] = ()) -> StepOutput:
    rows = len(out.scheduled)
    return StepOutput(token_ids, [None] * rows, [None] * rows, dict.fromkeys(failed, FinishReason.ERROR))


def spans(out: SchedulerOutput) -> list[tuple[int, int, int]]:
    return [(row.seq_id, row.start, row.start + len(row.token_ids)) for row in out.scheduled]
