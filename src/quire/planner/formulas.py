"""The arithmetic of inference: bounds, bytes and times as functions of plain numbers.

Gigabytes are 1e9 bytes, as in datasheets; times are in milliseconds where a name ends with `_ms`. These are bounds for
planning: `quire inspect` counts the bytes of a model exactly, and `quire bench` measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TOKENS_PER_WORD = 1.3  # roughly, for English; reports measure it on the real text


def positive(**values: float) -> None:
    """Raise ValueError for the first number that is not above 0."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}: {value:g} must be above 0")


def stream_bound(model_gb: float, bandwidth_gb_s: float, devices: int = 1) -> float:
    """The highest tokens per second of one stream: every token reads all weights once, from all devices together.

    Raises ValueError when a quantity is not above 0.
    """
    positive(model_gb=model_gb, bandwidth_gb_s=bandwidth_gb_s, devices=devices)
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
    memory_gb: float, model_gb: float, reserve_gb: float, bytes_per_token: float, users: int = 1
) -> int:
    """Context in tokens per user; 0 if the budget is negative. Raises ValueError for users below 1."""
    if users < 1:
        raise ValueError(f"users: {users} is below 1")
    room = max(0.0, memory_gb - model_gb - reserve_gb) * 1e9
    return int(room / users / bytes_per_token)


def users_within(budget_gb: float, gb_per_user: float) -> int:
    """The number of users whose KV caches fit a budget."""
    return int(max(0.0, budget_gb) / gb_per_user)


def accepted_length(alpha: float, gamma: int) -> float:
    """Tokens of a round of speculation: 1 + α + … + α^γ, when each draft is right with probability α.

    Leviathan et al. 2023, arXiv 2211.17192, equation 1. Raises ValueError for α outside 0 to 1 or γ below 0.
    """
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ValueError(f"alpha: {alpha:g} must be from 0 to 1, and gamma: {gamma} at least 0")
    return sum(alpha**power for power in range(gamma + 1))


def speculative_speedup(alpha: float, gamma: int, draft_ms: float, target_ms: float) -> float:
    """Rate with γ drafts of `draft_ms` each over the rate without; checking them costs one target step.

    Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8.
    """
    positive(target_ms=target_ms)
    return accepted_length(alpha, gamma) * target_ms / (target_ms + gamma * draft_ms)


def linear_times_ms(
    rows: int, inputs: int, outputs: int, bytes_per_weight: float, tflops: float, bandwidth_gb_s: float
) -> tuple[float, float]:
    """Milliseconds of a linear layer's arithmetic and of reading its weights, each by itself (roofline)."""
    positive(tflops=tflops, bandwidth_gb_s=bandwidth_gb_s)
    return (
        2 * rows * inputs * outputs / tflops / 1e9,
        inputs * outputs * bytes_per_weight / bandwidth_gb_s / 1e6,
    )


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """The share of time in which a stage waits: (p − 1) / (m + p − 1) (Huang et al. 2019, arXiv 1811.06965)."""
    if stages < 1 or micro_batches < 1:
        raise ValueError("stages and micro_batches: must be at least 1")
    return (stages - 1) / (micro_batches + stages - 1)


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `size` bytes: 2 (n − 1) / n of them."""
    return 2 * (ranks - 1) / ranks * size


def activation_bytes(hidden: int, tokens: float) -> float:
    """Memory of a step of so many tokens beside weights and caches, roughly: four buffers of the width of the stream,
    in 16 bits."""
    return 4 * 2.0 * hidden * tokens


def attention_traffic_bytes(heads: int, tokens: int, bytes_per_value: float = 2) -> float:
    """Bytes that naive attention of one layer moves for its score matrices: written once, read twice."""
    return 3.0 * heads * tokens * tokens * bytes_per_value


def cost_per_million(price_per_hour: float, devices: int, tokens_per_second: float) -> float:
    """Money for a million tokens."""
    positive(tokens_per_second=tokens_per_second)
    return price_per_hour * devices / tokens_per_second / 3600 * 1e6


def sharpened(
    chances: Sequence[float], rest: float, others: int, temperature: float
) -> tuple[list[float], float]:
    """Probabilities at a temperature, from those at 1, and what is left for `others` that share `rest` equally.

    At 0 all is on the highest, the first of equals.
    """
    if temperature == 0:
        first = list(chances).index(max(chances))
        return [float(i == first) for i in range(len(chances))], 0.0
    weights = [chance ** (1 / temperature) for chance in chances]
    tail = others * (rest / others) ** (1 / temperature) if rest else 0.0
    total = sum(weights) + tail
    return [weight / total for weight in weights], tail / total
