"""Rules of thumb that need an engine's parts: where to look first, and how the real scheduler cuts a prompt."""

from __future__ import annotations

from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.types import Request, SamplingParams, StepOutput, TokenIds


def investigate(
    ttft_p95_ms: float, itl_p95_ms: float, *, slow_start: float = 900, smooth: float = 80, choppy: float = 120
) -> str:
    """Say where to look first. A late first token with a smooth stream is queueing or prefill; wide gaps are decode."""
    if ttft_p95_ms > slow_start and itl_p95_ms <= smooth:
        return "inspect queueing and prefill"
    if itl_p95_ms > choppy:
        return "inspect decode scheduling and memory pressure"
    return "within example thresholds"


def chunked_schedule(prompt_tokens: int, chunk_tokens: int) -> list[str]:
    """List the steps of the real scheduler for a prompt that arrives while a stream is running.

    A step contains the next token of the stream and a chunk of the prompt.
    """
    budget = chunk_tokens + 1
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=prompt_tokens // 16 + 64,
            max_num_batched_tokens=budget,
            max_model_len=prompt_tokens + 512,
            max_num_seqs=2,
        )
    )
    params = SamplingParams(max_tokens=256, ignore_eos=True)
    scheduler.add(Request(request_id="stream", prompt_token_ids=TokenIds([1]), params=params))
    actions: list[str] = []
    _step(scheduler)
    scheduler.add(
        Request(
            request_id="prompt", prompt_token_ids=TokenIds(range(prompt_tokens)), params=params, arrival=1.0
        )
    )
    left = prompt_tokens
    while left:
        stream, chunk = _step(scheduler)
        assert stream == 1
        left -= chunk
        actions += [f"prefill {chunk}", "decode active streams"]
    return actions


def _step(scheduler: Scheduler) -> list[int]:
    out = scheduler.schedule()
    rows = len(out.scheduled)
    scheduler.update(
        out, StepOutput([[1] if row.sample else [] for row in out.scheduled], [None] * rows, [None] * rows)
    )
    return [len(row.token_ids) for row in out.scheduled]
