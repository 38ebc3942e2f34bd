"""The calculators of `quire calc`: each is a function of named numbers that gives labelled results.

A parameter's name is its option, with its unit at the end. PARAMETERS says what each one means; a model or a device
fills those that it knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from quire.planner import formulas, memory_sums, strategy_sums, time_sums
from quire.planner.devices import Device
from quire.planner.figure import Figure, Figures
from quire.planner.model_size import ModelSize
from quire.records import dataclass

PARAMETERS = {
    "params_b": "parameters, in billions",
    "active_b": "parameters that take part in one token, in billions (experts: those chosen)",
    "bits": "bits of a weight",
    "kv_bits": "bits of a number in the KV cache",
    "layers": "layers",
    "heads": "query heads",
    "kv_heads": "KV heads",
    "head_dim": "numbers of a head",
    "hidden": "width of the residual stream",
    "width": "width of a feed-forward",
    "lengths": "tokens of each answer, between commas",
    "gaps_ms": "time between two tokens of each, in ms, between commas",
    "tokens": "context of a sequence, in tokens",
    "prompt": "tokens of the prompt",
    "output": "tokens of the answer",
    "batch": "sequences in a step",
    "users": "users at a time",
    "devices": "devices",
    "memory_gb": "memory of a device, in GB",
    "bandwidth_gb_s": "memory bandwidth of a device, in GB/s",
    "tflops": "dense arithmetic of a device, in TFLOPS",
    "reserve_gb": "memory of each device for activations, kernels and fragmentation, in GB",
    "ttft_ms": "time to the first token, in ms",
    "total_ms": "time to the last token (E2EL), in ms",
    "tpot_ms": "longest time of an output token, in ms",
    "alpha": "chance that a draft is right",
    "gamma": "drafts of a round",
    "draft_ms": "time of one draft, in ms",
    "target_ms": "time of a step of the target, in ms",
    "rows": "rows of the step: tokens that go through the layer together",
    "inputs": "inputs of a linear layer",
    "outputs": "outputs of a linear layer",
    "stages": "pipeline stages",
    "micro_batches": "micro-batches in flight",
    "ranks": "ranks that share each layer",
    "link_gb_s": "bandwidth between devices, in GB/s",
    "interference_ms": "delay that prompts cause in running streams when both share a device, in ms",
    "price": "price of a device for an hour",
    "tokens_per_second": "tokens a second of the whole deployment",
    "watts": "power of a device, in W",
    "price_kwh": "price of a kilowatt-hour",
    "prefix": "tokens of the shared prefix",
    "new": "tokens behind the prefix",
    "ms_per_token": "prefill time of a token, in ms",
    "requests": "requests with that prefix, or in all",
    "kept": "requests that kept every objective",
    "seconds": "time in which the requests came, in s",
    "target": "probabilities of the target, token by token, between commas",
    "draft": "those of the draft",
    "longest": "tokens of the longest answer, for which a contiguous cache is set aside",
    "block_size": "tokens of a block",
    "probabilities": "of the likeliest tokens at temperature 1, between commas",
    "others": "tokens that share what is left",
    "temperature": "sampling temperature",
    "top_k": "candidates kept; 0: all",
    "top_p": "probability that the candidates kept reach together",
}


@dataclass(frozen=True, slots=True)
class Calculator:
    """A function of named numbers."""

    name: str
    run: Callable[..., Figures]

    @property
    def about(self) -> str:
        return inspect.getdoc(self.run) or ""

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.run, eval_str=True).parameters

    def figures(
        self,
        given: Mapping[str, Any],
        model: ModelSize | None = None,
        device: Device | None = None,
        count: int = 1,
    ) -> list[Figure]:
        """The results. What is not given comes from the model, the device, then from defaults.

        Raises ValueError, naming the parameter, for one that nothing gives or that is out of range.
        """
        known = _of_device(device, count) | _of_model(model)
        values = {name: known[name] for name in self.parameters if name in known} | dict(given)
        missing = [
            name for name, one in self.parameters.items() if name not in values and one.default is one.empty
        ]
        if missing:
            raise ValueError(f"{', '.join(missing)}: needed; give it, or a model or device that has it")
        for name, value in values.items():
            if not isinstance(value, str) and name not in _MAY_BE_ZERO:
                formulas.positive(**{name: value})
        return list(self.run(**values))


_MAY_BE_ZERO = {
    "reserve_gb", "kv_values", "active_b", "gamma", "alpha", "draft_ms", "watts", "price_kwh", "temperature", "top_k",
    "interference_ms", "new", "kept",
}  # fmt: skip


def _of_model(model: ModelSize | None) -> dict[str, Any]:
    if model is None:
        return {}
    names = (
        "params_b",
        "active_b",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "hidden",
        "width",
        "kv_values",
    )
    return {name: getattr(model, name) for name in names}


def _of_device(device: Device | None, count: int) -> dict[str, Any]:
    if device is None:
        return {}
    known: dict[str, Any] = {
        "memory_gb": device.memory_gb, "bandwidth_gb_s": device.bandwidth_gb_s, "devices": count,
    }  # fmt: skip
    optional = {"tflops": device.tflops.get("bf16"), "link_gb_s": device.link_gb_s, "watts": device.watts}
    return known | {name: value for name, value in optional.items() if value}


CALCULATORS = {
    one.name: one
    for one in (
        Calculator(function.__name__.replace("_", "-"), function)
        for function in (
            time_sums.throughput, memory_sums.weights, memory_sums.kv_cache, memory_sums.memory, memory_sums.context,
            memory_sums.batch_within, time_sums.intensity, time_sums.roofline, time_sums.phases,
            time_sums.latency, time_sums.itl,
            time_sums.batching, time_sums.layer, time_sums.speculation, time_sums.communication,
            memory_sums.transfer, time_sums.cost,
            memory_sums.prefix_cache, time_sums.attention_traffic, memory_sums.paging, time_sums.sampling,
            strategy_sums.strategies, strategy_sums.goodput, strategy_sums.rejection,
        )
    )
}  # fmt: skip
