"""StableLM 2, StableLM Zephyr and StableLM 3B (2402.17834)."""

from __future__ import annotations

from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import Biases, Defaults, decoder, layer_count, with_layers
from quire.spec.model import ModelSpec, NormSpec, QKNorm, WeightNames
from quire.spec.rope_config import RopeStyle

_STABLELM = Defaults(
    max_positions=4096, kv_heads=32, norm=NormSpec("layer", 1e-5, bias=True), eps_key="layer_norm_eps",
    rope=RopeStyle(partial=0.25),
)  # fmt: skip
_NAMES = WeightNames(
    q_norm="model.layers.{i}.self_attn.q_layernorm.norms.{h}",
    k_norm="model.layers.{i}.self_attn.k_layernorm.norms.{h}",
)


def stablelm(config: ConfigReader) -> ModelSpec:
    """LayerNorms with bias; with `qk_layernorm`, one norm per head."""
    biases = Biases(qkv=config.boolean("use_qkv_bias", False))
    per_head = QKNorm(NormSpec("layer"), shared=False) if config.boolean("qk_layernorm", False) else None
    spec = decoder(config, _STABLELM, [0] * layer_count(config), biases=biases, qk_norm=per_head)
    parallel = config.boolean("use_parallel_residual", False)
    return replace(with_layers(spec, parallel=parallel), names=_NAMES)
