"""How long a step takes at least on hardware that one does not have: the longer of its arithmetic and its memory reads.

    arithmetic   2 FLOP for each active parameter and token, 4 for each number of a head, query and key
    memory       all weights once, and the keys and values that decode rows read

A bound: no overhead, no communication, and mixed experts count as if all were read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.planner.devices import Device
from quire.planner.model_size import ModelSize


def roofline_time(
    model: ModelSize, device: Device, count: int = 1, *, bits: float = 16, overhead: float = 0.0
) -> Callable[[Sequence[float]], float]:
    """Seconds of a step by cost_model.FEATURES, on `count` devices that share the work evenly. `overhead`: seconds of
    each step that are neither. Raises ValueError for a device without a rate of bf16 arithmetic.
    """
    peak = device.tflops.get("bf16") or next(iter(device.tflops.values()), 0.0)
    if not peak:
        raise ValueError(f"device: {device.name} has no rate of arithmetic")
    flops, bandwidth = peak * 1e12 * count, device.bandwidth_gb_s * 1e9 * count
    per_token = 2e9 * model.active_b
    per_pair = 4.0 * model.layers * model.heads * model.head_dim
    weights, per_key = model.params_b * 1e9 * bits / 8, model.kv_values * 2.0

    def seconds(features: Sequence[float]) -> float:
        _, rows, prompt, keys, work, *_, drafts = features
        compute = ((rows + prompt + drafts) * per_token + (keys + work) * per_pair) / flops
        memory = (weights + keys * per_key) / bandwidth
        return overhead + max(compute, memory)

    return seconds
