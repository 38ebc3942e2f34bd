"""gpt-oss 20B and 120B (2508.10925)."""

from __future__ import annotations

from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import (
    MAX_WIDTH,
    Biases,
    Defaults,
    decoder,
    layer_count,
    window_size,
    windows_of_types,
)
from quire.spec.families.experts import read_experts, softmax_router, with_experts
from quire.spec.model import ClampedSwiGLU, ExpertStacks, ModelSpec, MoE, NormSpec, WeightNames
from quire.spec.rope_config import RopeStyle

_GPT_OSS = Defaults(
    max_positions=131_072, kv_heads=8, head_dim=64, window=128, norm=NormSpec(eps=1e-5),
    rope=RopeStyle(theta=150_000.0),
)  # fmt: skip
_NAMES = WeightNames(router="model.layers.{i}.mlp.router")
_STACKS = ExpertStacks(transposed=True, interleaved=True)
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def gpt_oss(config: ConfigReader) -> ModelSpec:
    """Attention with sinks, every other layer with a window; clamped SwiGLU; YaRN by default."""
    if config.string("hidden_act", "silu") != "silu":
        raise config.unsupported("hidden_act", "the gate of this model type is a SiLU")
    if not config.has("rope_scaling") and not config.has("rope_parameters"):
        values = {**config.values, "rope_scaling": _YARN}
        config = ConfigReader(values, config.where, config.notices)
    window = window_size(config, _GPT_OSS)
    windows = windows_of_types(config, window)
    if windows is None:
        windows = [0 if i % 2 else window for i in range(layer_count(config))]
    bias = config.boolean("attention_bias", True)
    spec = decoder(config, _GPT_OSS, windows, biases=Biases(qkv=bias, out=bias))
    sinks = (replace(x, mixer=replace(x.grouped, sinks=True)) for x in spec.layers)
    router = softmax_router(config, read_experts(config, 128), 4, renormalise=True)
    act = ClampedSwiGLU(
        config.number("swiglu_alpha", 1.702, low=0.0, high=1e3),
        config.number("swiglu_limit", 7.0, low=1e-3, high=1e6),
    )
    moe = MoE(
        replace(router, bias=True), config.integer("intermediate_size", high=MAX_WIDTH), act, bias=True
    )  # fmt: skip
    return replace(with_experts(replace(spec, layers=tuple(sinks)), moe), names=_NAMES, stacks=_STACKS)
