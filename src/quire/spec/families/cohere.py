"""Command R, Command R+, Aya (Cohere) and Command R7B, Command A (Cohere 2)."""

from __future__ import annotations

from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import (
    Biases,
    Defaults,
    decoder,
    layer_count,
    read_head_dim,
    read_max_positions,
    window_size,
    windows_by_pattern,
    with_layers,
)
from quire.spec.model import ModelSpec, NormSpec, QKNorm
from quire.spec.rope_config import RopeStyle, context_lengths, read_rope

_COHERE = Defaults(
    max_positions=8192, norm=NormSpec("layer", 1e-5), eps_key="layer_norm_eps", tied=True,
    rope=RopeStyle(theta=500_000.0, interleaved=True),
)  # fmt: skip
_COHERE2 = replace(_COHERE, rope=RopeStyle(interleaved=True))


def cohere(config: ConfigReader) -> ModelSpec:
    """Parallel attention and feed-forward after one LayerNorm; q and k norms with `use_qk_norm`."""
    per_head = QKNorm(NormSpec("layer"), shared=False) if config.boolean("use_qk_norm", False) else None
    spec = decoder(config, _COHERE, [0] * layer_count(config), biases=_biases(config), qk_norm=per_head)
    return _parallel(config, spec)


def cohere2(config: ConfigReader) -> ModelSpec:
    """Three sliding layers, then a full one without rotation."""
    windows = windows_by_pattern(config, window_size(config, _COHERE2), 4)
    positions = read_max_positions(config, _COHERE2)
    rope = read_rope(config, read_head_dim(config, _COHERE2), positions, _COHERE2.rope)
    ropes = [rope if window else None for window in windows]
    spec = decoder(config, _COHERE2, windows, biases=_biases(config), ropes=ropes)
    positions, longest = context_lengths(rope, positions)
    return _parallel(config, replace(spec, max_positions=positions, longest=longest))


def _parallel(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    scale = config.number("logit_scale", 0.0625, low=1e-6, high=1e6)
    return replace(with_layers(spec, parallel=True), logits_scale=scale)


def _biases(config: ConfigReader) -> Biases:
    bias = config.boolean("attention_bias", False)
    return Biases(qkv=bias, out=bias)
