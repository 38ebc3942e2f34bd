"""Granite 3 dense text models."""

from __future__ import annotations

from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import Biases, Defaults, decoder, layer_count
from quire.spec.model import ModelSpec

_GRANITE = Defaults(max_positions=2048)


def granite(config: ConfigReader) -> ModelSpec:
    """Llama's blocks with multipliers on embeddings, attention scores, branches and logits."""
    bias = config.boolean("attention_bias", False)
    biases = Biases(qkv=bias, out=bias, mlp=config.boolean("mlp_bias", False))
    scale = _multiplier(config, "attention_multiplier")
    spec = decoder(config, _GRANITE, [0] * layer_count(config), biases=biases, scale=scale)
    return replace(
        spec,
        embed_scale=_multiplier(config, "embedding_multiplier"),
        residual_scale=_multiplier(config, "residual_multiplier"),
        logits_scale=1.0 / _multiplier(config, "logits_scaling"),
    )


def _multiplier(config: ConfigReader, key: str) -> float:
    return config.number(key, 1.0, low=1e-6, high=1e6)
