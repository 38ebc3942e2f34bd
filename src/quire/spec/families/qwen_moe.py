"""Qwen1.5-MoE, Qwen2-MoE (2407.10671) and Qwen3-MoE (2505.09388) text models."""

from __future__ import annotations

from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import (
    MAX_LAYERS,
    MAX_WIDTH,
    Biases,
    Defaults,
    decoder,
    layer_count,
    read_activation,
    window_size,
    windows_of_types,
)
from quire.spec.families.experts import dense_layers, read_experts, softmax_router, with_experts
from quire.spec.model import MLP, ModelSpec, MoE, NormSpec, QKNorm

_QWEN2 = Defaults(max_positions=32768, kv_heads=16)
_QWEN3 = replace(_QWEN2, kv_heads=4)


def qwen2_moe(config: ConfigReader) -> ModelSpec:
    """Every token also goes to a shared expert, whose output is gated; `qkv_bias` (missing: true) covers q, k and v."""
    biases = Biases(qkv=config.boolean("qkv_bias", True))
    spec = decoder(config, _QWEN2, _windows(config), biases=biases)
    width = config.integer("shared_expert_intermediate_size", 5632, high=MAX_WIDTH)
    shared = MLP(width, read_activation(config, _QWEN2))
    return _with_experts(config, spec, (60, 4, 1408), shared)


def qwen3_moe(config: ConfigReader) -> ModelSpec:
    """Qwen3's attention; `sliding_window` applies to every layer if `use_sliding_window` is true."""
    window = window_size(config, _QWEN3) if config.boolean("use_sliding_window", False) else 0
    bias = config.boolean("attention_bias", False)
    windows = [window] * layer_count(config)
    spec = decoder(config, _QWEN3, windows, biases=Biases(qkv=bias, out=bias), qk_norm=QKNorm(NormSpec()))
    return _with_experts(config, spec, (128, 8, 768))


def _with_experts(
    config: ConfigReader, spec: ModelSpec, defaults: tuple[int, int, int], shared: MLP | None = None
) -> ModelSpec:
    """`defaults`: num_experts, num_experts_per_tok and moe_intermediate_size if they are missing."""
    experts = read_experts(config, defaults[0], low=0)
    if experts == 0:
        return spec
    renormalise = config.boolean("norm_topk_prob", False)
    router = softmax_router(config, experts, defaults[1], renormalise=renormalise)
    width = config.integer("moe_intermediate_size", defaults[2], high=MAX_WIDTH)
    moe = MoE(router, width, read_activation(config, _QWEN2), shared=shared, shared_gate=shared is not None)
    return with_experts(spec, moe, dense_layers(config, len(spec.layers)))


def _windows(config: ConfigReader) -> list[int]:
    """Windows by `layer_types`, else in every other layer below `max_window_layers`, if `use_sliding_window` is set."""
    window = window_size(config, _QWEN2) if config.boolean("use_sliding_window", False) else 0
    windows = windows_of_types(config, window)
    if windows is not None:
        return windows
    last = config.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
    return [window if i % 2 == 0 and i < last else 0 for i in range(layer_count(config))]
