"""OLMo 2 and OLMo 3 dense text models (2501.00656)."""

from __future__ import annotations

from collections.abc import Sequence
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
from quire.spec.model import ModelSpec, NormSpec, QKNorm, Rope
from quire.spec.rope_config import RopeStyle, make_rope, read_rope, ropes_by_type

_OLMO2 = Defaults(max_positions=2048, norm=NormSpec(eps=1e-5))
_OLMO3 = replace(_OLMO2, rope=RopeStyle(theta=500_000.0))


def olmo2(config: ConfigReader) -> ModelSpec:
    """Norms come after branches instead of before; q and k are normalised over all heads together."""
    return _post_norm(config, _OLMO2, [0] * layer_count(config), None)


def olmo3(config: ConfigReader) -> ModelSpec:
    """OLMo 2 with three sliding layers per full one; only full layers have a scaled rope."""
    windows = windows_by_pattern(config, window_size(config, _OLMO3), 4)
    head_dim, positions, style = (
        read_head_dim(config, _OLMO3),
        read_max_positions(config, _OLMO3),
        _OLMO3.rope,
    )
    ropes = ropes_by_type(config, head_dim, positions, {"full_attention": style, "sliding_attention": style})
    if ropes is None:
        ropes = {
            "full_attention": read_rope(config, head_dim, positions, style),
            "sliding_attention": make_rope(config, None, head_dim, positions, style),
        }
    chosen = [ropes["sliding_attention" if window else "full_attention"] for window in windows]
    return _post_norm(config, _OLMO3, windows, chosen)


def _post_norm(
    config: ConfigReader, defaults: Defaults, windows: Sequence[int], ropes: Sequence[Rope] | None
) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    spec = decoder(
        config, defaults, windows, biases=Biases(qkv=bias, out=bias),
        qk_norm=QKNorm(NormSpec(), whole=True), ropes=ropes,
    )  # fmt: skip
    return with_layers(spec, pre_norm=False, post_norm=True)
