"""Gemma 1, Gemma 2 and Gemma 3 text models (2403.08295, 2408.00118, 2503.19786)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import (
    GEMMA_READS,
    Biases,
    Defaults,
    decoder,
    layer_count,
    read_head_dim,
    read_max_positions,
    refuse_foreign_keys,
    window_size,
    windows_by_pattern,
    with_layers,
)
from quire.spec.model import ModelSpec, NormSpec, QKNorm, Rope, WeightNames
from quire.spec.rope_config import RopeStyle, make_rope, read_rope, ropes_by_type

_NORM = NormSpec(added=1.0)  # weights are stored as differences from one
_GEMMA = Defaults(
    max_positions=8192, kv_heads=16, head_dim=256, norm=_NORM, act="gelu_pytorch_tanh", tied=True
)
_GEMMA2 = replace(_GEMMA, kv_heads=4, act_key="hidden_activation")
_GEMMA3 = replace(_GEMMA2, max_positions=131_072)
_GEMMA3_SIZES = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip
# Released checkpoints and those written by transformers 5 name the language model differently.
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.", ""),
)
_IMAGE_TENSORS = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")
_GLOBAL, _LOCAL = RopeStyle(theta=1_000_000.0), RopeStyle(theta=10_000.0)
_SANDWICH = WeightNames(mlp_norm="model.layers.{i}.pre_feedforward_layernorm")


def gemma(config: ConfigReader) -> ModelSpec:
    """Released configs set `gelu` but mean its tanh approximation, as in `hidden_activation`."""
    values = dict(config.values)
    if values.get("hidden_act") in (None, "gelu"):
        values["hidden_act"] = "gelu_pytorch_tanh"
    config = ConfigReader(values, config.where, config.notices)
    spec = decoder(config, _GEMMA, [0] * layer_count(config), biases=_biases(config))
    return _scaled(spec)


def gemma2(config: ConfigReader) -> ModelSpec:
    """Sliding and full layers alternate; scores and logits are soft-capped."""
    windows = windows_by_pattern(config, window_size(config, _GEMMA2), 2)
    spec = decoder(config, _GEMMA2, windows, biases=_biases(config), scale=_scale(config))
    cap = _cap(config, "attn_logit_softcapping", 50.0)
    spec = replace(_sandwich(spec), logits_cap=_cap(config, "final_logit_softcapping", 30.0))
    return replace(spec, layers=tuple(replace(x, mixer=replace(x.grouped, softcap=cap)) for x in spec.layers))


def gemma3(config: ConfigReader) -> ModelSpec:
    """Five sliding layers per full one, each kind with its own rope."""
    windows = windows_by_pattern(config, window_size(config, _GEMMA3), 6)
    spec = decoder(
        config, _GEMMA3, windows, biases=_biases(config), scale=_scale(config),
        qk_norm=QKNorm(_NORM), ropes=_ropes(config, windows),
    )  # fmt: skip
    return replace(_sandwich(spec), logits_cap=_cap(config, "final_logit_softcapping", 0.0))


def gemma3_multimodal(config: ConfigReader) -> ModelSpec:
    """The language model of a checkpoint with an image tower; its `text_config` omits defaults."""
    text = config.child("text_config")
    if text is None:
        raise config.error("text_config", "is missing")
    shared = {
        key: config.values[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if config.has(key)
    }
    merged = ConfigReader({**_GEMMA3_SIZES, **shared, **text.values}, text.where, config.notices)
    refuse_foreign_keys(merged, GEMMA_READS)
    config.notices.append(
        f"{config.where}: the image tower is not implemented: its tensors are ignored, and the model accepts text only"
    )
    spec = gemma3(merged)
    return replace(spec, prefixes=_TEXT_PREFIXES, ignored=(*spec.ignored, *_IMAGE_TENSORS))


def _ropes(config: ConfigReader, windows: Sequence[int]) -> list[Rope]:
    """`rope_theta` and `rope_scaling` are for full layers, `rope_local_base_freq` for sliding ones."""
    head_dim, max_positions = read_head_dim(config, _GEMMA3), read_max_positions(config, _GEMMA3)
    styles = {"full_attention": _GLOBAL, "sliding_attention": _LOCAL}
    ropes = ropes_by_type(config, head_dim, max_positions, styles)
    if ropes is None:
        theta = config.number("rope_local_base_freq", _LOCAL.theta, low=1.0, high=1e15)
        local = ConfigReader({"rope_theta": theta}, config.where)
        ropes = {
            "full_attention": read_rope(config, head_dim, max_positions, _GLOBAL),
            "sliding_attention": make_rope(local, None, head_dim, max_positions, _LOCAL),
        }
    return [ropes["sliding_attention" if window else "full_attention"] for window in windows]


def _biases(config: ConfigReader) -> Biases:
    bias = config.boolean("attention_bias", False)
    return Biases(qkv=bias, out=bias)


def _scale(config: ConfigReader) -> float:
    return 1.0 / math.sqrt(config.number("query_pre_attn_scalar", 256.0, low=1e-3, high=1e6))


def _scaled(spec: ModelSpec) -> ModelSpec:
    return replace(spec, embed_scale=math.sqrt(spec.dim))


def _sandwich(spec: ModelSpec) -> ModelSpec:
    return replace(with_layers(_scaled(spec), post_norm=True), names=_SANDWICH)


def _cap(config: ConfigReader, key: str, default: float) -> float:
    """A soft cap; an explicit null turns it off."""
    if key in config.values and not config.has(key):
        return 0.0
    return config.number(key, default, low=1e-3, high=1e6) if default or config.has(key) else 0.0
