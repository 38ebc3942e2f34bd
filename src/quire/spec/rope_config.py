"""Rope keys of a config.json, old style and new, to a Rope.

Old style: `rope_theta` at the top and `rope_scaling: {"type" or "rope_type": …}`. New style (transformers
5): everything in `rope_parameters`. Priorities and defaults are those of transformers'
RotaryEmbeddingConfigMixin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from quire.spec.config_reader import ConfigReader, show
from quire.spec.model import Rope
from quire.types import CheckpointError, UnsupportedModelError

MAX_POSITIONS = 2**28
_DEFAULT_THETA = 10_000.0
_MAX_THETA = 1e15
_MAX_FACTOR = 1e6
# Keys of rope kinds or variants that change the rotation and that no kind below reads.
_UNSUPPORTED_KEYS = ("mrope_section", "short_factor", "long_factor", "alpha")
_COMMON_KEYS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})
_KIND_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
}  # fmt: skip


def read_rope(config: ConfigReader, head_dim: int, max_positions: int) -> Rope:
    """The rotary embedding of a model whose whole head is rotated.

    `max_positions` is max_position_embeddings: the default of original_max_position_embeddings, and what
    `dynamic` stretches from. Raises UnsupportedModelError for a kind or variant that is not implemented,
    CheckpointError for values out of range.
    """
    scaling = _parameters(config)
    theta = _theta(config, scaling)
    _refuse_partial(config, scaling)
    if theta <= 1.0:
        raise CheckpointError(f"{config.where}: rope_theta: {theta} is not above 1")
    base = Rope(theta=theta, dim=head_dim)
    if scaling is None:
        return base
    kind = _kind(scaling)
    if kind not in _KINDS:
        key = "rope_type" if scaling.has("rope_type") else "type"
        raise scaling.unsupported(key, f"implemented kinds are {', '.join(_KINDS)}")
    for key in _UNSUPPORTED_KEYS:
        if scaling.has(key):
            raise scaling.unsupported(key, f"it is not a key of rope_type {kind!r}")
    for key, value in scaling.values.items():
        if isinstance(value, dict):
            raise scaling.unsupported(key, "rope parameters per layer type are not implemented")
        if key not in _COMMON_KEYS | _KIND_KEYS[kind]:
            config.notices.append(f"{scaling.where}: {key} is not read by rope_type {kind!r}: ignored")
    return _KINDS[kind](base, config, scaling, max_positions)


def scaled_positions(rope: Rope, max_positions: int) -> int:
    """The longest context a rope's scaling was made for, given max_position_embeddings.

    linear and dynamic stretch max_position_embeddings by their factor, yarn stretches the original context
    (a config may or may not have raised max_position_embeddings already); llama3 configs state the result.
    """
    match rope.kind:
        case "linear" | "dynamic":
            stretched = int(max_positions * rope.factor)
        case "yarn":
            stretched = int(rope.original_max * rope.factor)
        case _:
            stretched = max_positions
    return min(max(stretched, max_positions), MAX_POSITIONS)


def _parameters(config: ConfigReader) -> ConfigReader | None:
    old, new = config.child("rope_scaling"), config.child("rope_parameters")
    if old is not None and new is not None and dict(old.values) != dict(new.values):
        raise CheckpointError(f"{config.where}: rope_scaling and rope_parameters contradict each other")
    return old or new


def _kind(scaling: ConfigReader) -> str:
    kind = scaling.string("rope_type", None)
    legacy = scaling.string("type", None)
    if kind is not None and legacy is not None and kind != legacy:
        raise scaling.unsupported("type", f"rope_type is {show(kind)}")
    return kind or legacy or "default"


def _theta(config: ConfigReader, scaling: ConfigReader | None) -> float:
    top = config.number("rope_theta", None, low=1.0, high=_MAX_THETA)
    inner = None if scaling is None else scaling.number("rope_theta", None, low=1.0, high=_MAX_THETA)
    if top is not None and inner is not None and top != inner:
        config.notices.append(
            f"config.json: rope_theta {top:g} at the top gives way to {inner:g} of the rope parameters"
        )
    if inner is not None:
        return inner
    return _DEFAULT_THETA if top is None else top


def _refuse_partial(config: ConfigReader, scaling: ConfigReader | None) -> None:
    for reader in (config, scaling):
        if reader is not None and reader.number("partial_rotary_factor", 1.0, low=0.0, high=1.0) != 1.0:
            raise reader.unsupported("partial_rotary_factor", "this family rotates whole heads")


def _factor(scaling: ConfigReader) -> float:
    return scaling.number("factor", low=1.0, high=_MAX_FACTOR)


def _original_max(config: ConfigReader, scaling: ConfigReader, max_positions: int) -> int:
    """The top-level key wins over the nested one, as in transformers (Phi-3 wrote it there)."""
    nested = scaling.integer("original_max_position_embeddings", max_positions, high=MAX_POSITIONS)
    return config.integer("original_max_position_embeddings", nested, high=MAX_POSITIONS)


def _default(base: Rope, _config: ConfigReader, _scaling: ConfigReader, _max_positions: int) -> Rope:
    return base


def _linear(base: Rope, _config: ConfigReader, scaling: ConfigReader, _max_positions: int) -> Rope:
    return replace(base, kind="linear", factor=_factor(scaling))


def _dynamic(base: Rope, _config: ConfigReader, scaling: ConfigReader, max_positions: int) -> Rope:
    if base.dim <= 2:
        raise UnsupportedModelError(
            f"{scaling.where}: 'dynamic' needs heads wider than {base.dim} dimensions"
        )
    return replace(base, kind="dynamic", factor=_factor(scaling), original_max=max_positions)


def _llama3(base: Rope, config: ConfigReader, scaling: ConfigReader, max_positions: int) -> Rope:
    low = scaling.number("low_freq_factor", low=1e-3, high=_MAX_FACTOR)
    high = scaling.number("high_freq_factor", low=1e-3, high=_MAX_FACTOR)
    if high <= low:
        raise scaling.error("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}")
    original = _original_max(config, scaling, max_positions)
    return replace(
        base, kind="llama3", factor=_factor(scaling), original_max=original,
        low_freq_factor=low, high_freq_factor=high,
    )  # fmt: skip


def _yarn(base: Rope, config: ConfigReader, scaling: ConfigReader, max_positions: int) -> Rope:
    original = _original_max(config, scaling, max_positions)
    if scaling.has("factor"):
        factor = _factor(scaling)
    elif original < max_positions:
        factor = max_positions / original
    else:
        raise scaling.error("factor", "is missing, and original_max_position_embeddings does not imply it")
    if "truncate" in scaling.values and not scaling.has("truncate"):
        raise scaling.error("truncate", "null is not true or false")
    fast = scaling.number("beta_fast", 32.0, low=1e-3, high=_MAX_FACTOR)
    slow = scaling.number("beta_slow", 1.0, low=1e-3, high=_MAX_FACTOR)
    if fast < slow:
        raise scaling.error("beta_fast", f"{fast:g} is below beta_slow {slow:g}")
    return replace(
        base, kind="yarn", factor=factor, original_max=original, beta_fast=fast, beta_slow=slow,
        truncate=scaling.boolean("truncate", True), attention_factor=_attention_factor(scaling, factor),
    )  # fmt: skip


def _attention_factor(scaling: ConfigReader, factor: float) -> float:
    """YaRN's temperature (2309.00071, section 3.4); mscale and mscale_all_dim as DeepSeek defined them."""
    given = scaling.number("attention_factor", None, low=1e-3, high=1e3)
    if given is not None:
        return given

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale = scaling.number("mscale", 0.0, low=0.0, high=1e3)
    mscale_all_dim = scaling.number("mscale_all_dim", 0.0, low=0.0, high=1e3)
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


_KINDS: dict[str, Callable[[Rope, ConfigReader, ConfigReader, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
