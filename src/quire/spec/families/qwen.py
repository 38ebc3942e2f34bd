"""Qwen2, Qwen2.5 and Qwen3 dense text models."""

from __future__ import annotations

from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import (
    MAX_LAYERS,
    Biases,
    Defaults,
    decoder,
    layer_count,
    window_size,
    windows_of_types,
)
from quire.spec.model import ModelSpec, NormSpec, QKNorm

_QWEN2 = Defaults(max_positions=32768, kv_heads=32)
_QWEN3 = replace(_QWEN2, head_dim=128)


def qwen2(config: ConfigReader) -> ModelSpec:
    """q, k and v always have a bias, o never; an `attention_bias` key is not read."""
    return decoder(config, _QWEN2, _windows(config, _QWEN2), biases=Biases(qkv=True))


def qwen3(config: ConfigReader) -> ModelSpec:
    """q and k are RMS-normalised per head; `attention_bias` covers q, k, v and o."""
    if "head_dim" in config.values and not config.has("head_dim"):
        # transformers refuses null; others read it as hidden_size / heads, which differs from the default.
        raise config.error("head_dim", "null is not an integer")
    bias = config.boolean("attention_bias", False)
    return decoder(
        config,
        _QWEN3,
        _windows(config, _QWEN3),
        biases=Biases(qkv=bias, out=bias),
        qk_norm=QKNorm(NormSpec()),
    )


def _windows(config: ConfigReader, defaults: Defaults) -> list[int]:
    """Windows by `layer_types`, else from `max_window_layers` on; none unless `use_sliding_window`."""
    window = window_size(config, defaults) if config.boolean("use_sliding_window", False) else 0
    windows = windows_of_types(config, window)
    if windows is not None:
        return windows
    first = config.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
    return [window if layer >= first else 0 for layer in range(layer_count(config))]
