"""SmolLM3."""

from __future__ import annotations

from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import (
    MAX_LAYERS,
    Biases,
    Defaults,
    decoder,
    layer_count,
    read_head_dim,
    read_max_positions,
    window_size,
    windows_of_types,
)
from quire.spec.model import ModelSpec
from quire.spec.rope_config import RopeStyle, context_lengths, read_rope

_SMOLLM3 = Defaults(max_positions=32768, kv_heads=4, rope=RopeStyle(theta=2_000_000.0), tied=True)


def smollm3(config: ConfigReader) -> ModelSpec:
    """Every fourth layer does not rotate, unless `no_rope_layers` (1: rotates) is set."""
    count = layer_count(config)
    rotates = _rotating(config, count)
    window = window_size(config, _SMOLLM3) if config.boolean("use_sliding_window", False) else 0
    windows = windows_of_types(config, window)
    if windows is None:
        windows = [0 if rotate else window for rotate in rotates]
    positions = read_max_positions(config, _SMOLLM3)
    rope = read_rope(config, read_head_dim(config, _SMOLLM3), positions, _SMOLLM3.rope)
    bias = config.boolean("attention_bias", False)
    biases = Biases(qkv=bias, out=bias, mlp=config.boolean("mlp_bias", False))
    spec = decoder(config, _SMOLLM3, windows, biases=biases, ropes=[rope if r else None for r in rotates])
    positions, longest = context_lengths(rope, positions)
    return replace(spec, max_positions=positions, longest=longest)


def _rotating(config: ConfigReader, count: int) -> list[bool]:
    if config.has("no_rope_layers"):
        return [bool(n) for n in config.numbers("no_rope_layers", count, low=0, high=1)]
    interval = config.integer("no_rope_layer_interval", 4, high=MAX_LAYERS)
    return [(layer + 1) % interval != 0 for layer in range(count)]
