"""Rules of thumb for inference as functions: bounds, budgets and routing.

Gigabytes are decimal (1e9 bytes), as in datasheets. These are bounds for planning; `quire inspect` computes the exact
bytes of a model.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.types import Request, SamplingParams, StepOutput, TokenIds

TOKENS_PER_WORD = 1.3  # roughly, for English; reports measure it on the real text


def investigate(
    ttft_p95_ms: float, itl_p95_ms: float, *, slow_start: float = 900, smooth: float = 80, choppy: float = 120
) -> str:
    """Say where to look first. A late first token with a smooth stream is queueing or prefill; wide gaps are decode."""
    if ttft_p95_ms > slow_start and itl_p95_ms <= smooth:
        return "inspect queueing and prefill"
    if itl_p95_ms > choppy:
        return "inspect decode scheduling and memory pressure"
    return "within example thresholds"


def stream_bound(model_gb: float, bandwidth_gb_s: float, devices: int = 1) -> float:
    """The highest tokens per second of one stream: every token reads all weights once, from all devices together.

    Raises ValueError when a quantity is not above 0.
    """
    if not (model_gb > 0 and bandwidth_gb_s > 0 and devices > 0):
        raise ValueError("model_gb, bandwidth_gb_s and devices: must be above 0")
    return devices * bandwidth_gb_s / model_gb


def decode_bound(
    params_billions: float, bytes_per_param: float, bandwidth_gb_s: float, batch: int = 1
) -> float:
    """The highest tokens per second of a whole batch while reading the weights, not arithmetic or KV, is the limit."""
    return batch * stream_bound(params_billions * bytes_per_param, bandwidth_gb_s)


def kv_cache_bytes(layers: int, kv_heads: int, head_dim: int, tokens: int, bytes_per_value: float = 2) -> int:
    """Bytes of the KV cache for `tokens` tokens: keys and values of every layer. Heads are KV heads."""
    return int(2 * layers * kv_heads * head_dim * tokens * bytes_per_value)


def admits(existing: Sequence[int], new: int, budget_gb: float, bytes_per_token: int) -> bool:
    """Whether a request of `new` tokens fits in addition to requests of `existing` lengths."""
    return (sum(existing) + new) * bytes_per_token / 1e9 <= budget_gb


def max_context(
    memory_gb: float, model_gb: float, reserve_gb: float, bytes_per_token: int, users: int = 1
) -> int:
    """Context in tokens per user; 0 if the budget is negative. Raises ValueError for users below 1."""
    if users < 1:
        raise ValueError(f"users: {users} is below 1")
    room = max(0.0, memory_gb - model_gb - reserve_gb) * 1e9
    return int(room / users / bytes_per_token)


def users_within(budget_gb: float, gb_per_user: float) -> int:
    """The number of users whose KV caches fit a budget."""
    return int(budget_gb / gb_per_user)


def layout(interference_ms: float, transfer_ms: float) -> str:
    """Choose a layout: separate prefill and decode pay for moving the KV cache, joint ones for interference."""
    return "separate prefill and decode pools" if transfer_ms < interference_ms else "keep phases colocated"


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
