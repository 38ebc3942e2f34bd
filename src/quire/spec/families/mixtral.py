"""Mixtral (2401.04088)."""

from __future__ import annotations

from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import (
    MAX_WIDTH,
    Defaults,
    decoder,
    layer_count,
    read_activation,
    window_size,
)
from quire.spec.families.experts import read_experts, softmax_router, with_experts
from quire.spec.model import ExpertStacks, ModelSpec, MoE, NormSpec, WeightNames
from quire.spec.rope_config import RopeStyle

_MIXTRAL = Defaults(
    max_positions=4096 * 32, kv_heads=8, norm=NormSpec(eps=1e-5), rope=RopeStyle(theta=1_000_000.0)
)  # fmt: skip
_EXPERT = "model.layers.{i}.block_sparse_moe.experts.{e}."
_NAMES = WeightNames(
    router="model.layers.{i}.block_sparse_moe.gate",
    expert_gate=_EXPERT + "w1", expert_up=_EXPERT + "w3", expert_down=_EXPERT + "w2",
)  # fmt: skip
_STACKS = ExpertStacks(router="model.layers.{i}.mlp.gate")


def mixtral(config: ConfigReader) -> ModelSpec:
    """Mistral with `num_local_experts` in every layer; `sliding_window` applies to every layer (default: none)."""
    window = window_size(config, _MIXTRAL) if config.has("sliding_window") else 0
    spec = decoder(config, _MIXTRAL, [window] * layer_count(config))
    router = softmax_router(config, read_experts(config, 8), 2, renormalise=True)
    width = config.integer("intermediate_size", high=MAX_WIDTH)
    spec = with_experts(spec, MoE(router, width, read_activation(config, _MIXTRAL)))
    return replace(spec, names=_NAMES, stacks=_STACKS)
