"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini dense text models (2404.14219, 2412.08905, 2503.01743)."""

from __future__ import annotations

from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import Defaults, decoder, layer_count, window_size
from quire.spec.model import ModelSpec, NormSpec, WeightNames
from quire.spec.rope_config import RopeStyle

# Early releases call longrope "su", and once "yarn".
_ROPE = RopeStyle(partial=1.0, names=(("su", "longrope"), ("yarn", "longrope")), original=4096)
_PHI3 = Defaults(max_positions=4096, norm=NormSpec(eps=1e-5), rope=_ROPE)
_NAMES = WeightNames(
    qkv="model.layers.{i}.self_attn.qkv_proj", gate_up="model.layers.{i}.mlp.gate_up_proj"
)  # fmt: skip


def phi3(config: ConfigReader) -> ModelSpec:
    """q, k and v are rows of one tensor, gate and up of another. `sliding_window` applies to every layer."""
    window = window_size(config, _PHI3) if config.has("sliding_window") else 0
    return replace(decoder(config, _PHI3, [window] * layer_count(config)), names=_NAMES)
