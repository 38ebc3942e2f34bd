"""Translate the rope keys of a config.json, old style and new, to a Rope.

Old style: `rope_theta` at the top and `rope_scaling: {"type" or "rope_type": …}`. New style (transformers
5): everything in `rope_parameters`. Priorities and defaults are those of transformers'
RotaryEmbeddingConfigMixin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from quire.records import dataclass
from quire.spec.config_reader import ConfigReader, show
from quire.spec.model import Rope
from quire.types import CheckpointError, UnsupportedModelError

MAX_POSITIONS = 2**28
_MAX_THETA = 1e15
_MAX_FACTOR = 1e6
# Keys of rope variants that change the rotation and are not implemented.
_UNSUPPORTED_KEYS = ("mrope_section", "short_factor", "long_factor", "short_mscale", "long_mscale", "alpha")
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
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeStyle:
    """The default rotary embedding of a family, and its variants.

    `partial`: the rotated part of a head by default; None if a family always rotates whole heads. `names`: the family's
    names of kinds. `original`: its original_max_position_embeddings.
    """

    theta: float = 10_000.0
    partial: float | None = None
    interleaved: bool = False
    names: tuple[tuple[str, str], ...] = ()
    original: int | None = None


_PLAIN = RopeStyle()


def read_rope(config: ConfigReader, head_dim: int, max_positions: int, style: RopeStyle = _PLAIN) -> Rope:
    """Read the rotary embedding of a model that has only one.

    `max_positions` is max_position_embeddings: the default of original_max_position_embeddings, and the length that
    `dynamic` stretches. Raises UnsupportedModelError for a kind or variant that is not implemented,
    CheckpointError for values out of range.
    """
    return make_rope(config, _parameters(config), head_dim, max_positions, style)


def ropes_by_type(
    config: ConfigReader, head_dim: int, max_positions: int, styles: dict[str, RopeStyle]
) -> dict[str, Rope] | None:
    """Read one rotary embedding per layer type of `styles` from nested `rope_parameters`; None without them."""
    parameters = config.child("rope_parameters")
    if parameters is None or not any(isinstance(parameters.values.get(name), dict) for name in styles):
        return None
    for key in parameters.values:
        if key not in styles:
            raise parameters.unsupported(key, f"layer types are {', '.join(styles)}")
    return {
        name: make_rope(config, parameters.child(name), head_dim, max_positions, style)
        for name, style in styles.items()
    }


def make_rope(
    config: ConfigReader, scaling: ConfigReader | None, head_dim: int, max_positions: int, style: RopeStyle
) -> Rope:
    """Make the rotary embedding from the parameters in `scaling`, or from the config's top-level keys if it is None."""
    theta = _theta(config, scaling, style)
    if theta <= 1.0:
        raise CheckpointError(f"{config.where}: rope_theta: {theta} is not above 1")
    base = Rope(theta=theta, dim=_rotated(config, scaling, head_dim, style), interleaved=style.interleaved)
    if scaling is None:
        return base
    kind = dict(style.names).get(_kind(scaling), _kind(scaling))
    if kind not in _KINDS:
        key = "rope_type" if scaling.has("rope_type") else "type"
        raise scaling.unsupported(key, f"implemented kinds are {', '.join(_KINDS)}")
    for key in _UNSUPPORTED_KEYS:
        if scaling.has(key) and key not in _KIND_KEYS[kind]:
            raise scaling.unsupported(key, f"rope_type {kind!r} has no such key")
    for key, value in scaling.values.items():
        if isinstance(value, dict):
            raise scaling.unsupported(key, "rope parameters per layer type are not implemented")
        if key not in _COMMON_KEYS | _KIND_KEYS[kind]:
            config.notices.append(f"{scaling.where}: {key} is not read by rope_type {kind!r}: ignored")
    if kind in {"llama3", "yarn", "longrope"}:
        original = _original_max(config, scaling, style.original or max_positions)
        base = replace(base, original_max=original)
    return _KINDS[kind](base, scaling, max_positions)


def context_lengths(rope: Rope, max_positions: int) -> tuple[int, int]:
    """ModelSpec.max_positions and ModelSpec.longest of a model with this rope, given max_position_embeddings.

    The default of a kind that depends on the length is the length up to which the rotation is unscaled.
    """
    longest = scaled_positions(rope, max_positions)
    match rope.kind:
        case "dynamic":
            return max_positions, longest
        case "longrope":
            return min(rope.original_max, max_positions), longest
        case _:
            return longest, longest


def scaled_positions(rope: Rope, max_positions: int) -> int:
    """The longest context for which a rope's scaling was made, given max_position_embeddings.

    linear and dynamic stretch max_position_embeddings by their factor, yarn the original context (a config may or may
    not have raised max_position_embeddings already); llama3 and longrope configs contain the result.
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


def _theta(config: ConfigReader, scaling: ConfigReader | None, style: RopeStyle) -> float:
    top = config.number("rope_theta", None, low=1.0, high=_MAX_THETA)
    inner = None if scaling is None else scaling.number("rope_theta", None, low=1.0, high=_MAX_THETA)
    if top is not None and inner is not None and top != inner:
        config.notices.append(
            f"config.json: the top-level rope_theta {top:g} is overridden by {inner:g} in the rope parameters"
        )
    if inner is not None:
        return inner
    return style.theta if top is None else top


def _rotated(config: ConfigReader, scaling: ConfigReader | None, head_dim: int, style: RopeStyle) -> int:
    """Rotated dimensions of a head."""
    key, part = "partial_rotary_factor", style.partial
    for reader in (config, scaling):  # the nested key wins
        if reader is None or not reader.has(key):
            continue
        part = reader.number(key, low=0.0, high=1.0)
        if style.partial is None and part != 1.0:
            raise reader.unsupported(key, "this family rotates whole heads")
    dim = head_dim if part is None else int(head_dim * part)
    if dim < 2 or dim % 2:
        raise CheckpointError(
            f"{config.where}: {key}: {dim} of {head_dim} dimensions cannot be rotated in pairs"
        )
    return dim


def _factor(scaling: ConfigReader) -> float:
    return scaling.number("factor", low=1.0, high=_MAX_FACTOR)


def _original_max(config: ConfigReader, scaling: ConfigReader, max_positions: int) -> int:
    """The top-level key wins over the nested one, as in transformers (Phi-3 wrote it there)."""
    nested = scaling.integer("original_max_position_embeddings", max_positions, high=MAX_POSITIONS)
    return config.integer("original_max_position_embeddings", nested, high=MAX_POSITIONS)


def _default(base: Rope, _scaling: ConfigReader, _max_positions: int) -> Rope:
    return base


def _linear(base: Rope, scaling: ConfigReader, _max_positions: int) -> Rope:
    return replace(base, kind="linear", factor=_factor(scaling))


def _dynamic(base: Rope, scaling: ConfigReader, max_positions: int) -> Rope:
    if base.dim <= 2:
        raise UnsupportedModelError(
            f"{scaling.where}: 'dynamic' needs heads wider than {base.dim} dimensions"
        )
    return replace(base, kind="dynamic", factor=_factor(scaling), original_max=max_positions)


def _llama3(base: Rope, scaling: ConfigReader, _max_positions: int) -> Rope:
    low = scaling.number("low_freq_factor", low=1e-3, high=_MAX_FACTOR)
    high = scaling.number("high_freq_factor", low=1e-3, high=_MAX_FACTOR)
    if high <= low:
        raise scaling.error("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}")
    return replace(
        base, kind="llama3", factor=_factor(scaling), low_freq_factor=low, high_freq_factor=high
    )  # fmt: skip


def _yarn(base: Rope, scaling: ConfigReader, max_positions: int) -> Rope:
    if scaling.has("factor"):
        factor = _factor(scaling)
    elif base.original_max < max_positions:
        factor = max_positions / base.original_max
    else:
        raise scaling.error("factor", "is missing, and original_max_position_embeddings does not imply it")
    if "truncate" in scaling.values and not scaling.has("truncate"):
        raise scaling.error("truncate", "null is not true or false")
    fast = scaling.number("beta_fast", 32.0, low=1e-3, high=_MAX_FACTOR)
    slow = scaling.number("beta_slow", 1.0, low=1e-3, high=_MAX_FACTOR)
    if fast < slow:
        raise scaling.error("beta_fast", f"{fast:g} is below beta_slow {slow:g}")
    return replace(
        base, kind="yarn", factor=factor, beta_fast=fast, beta_slow=slow,
        truncate=scaling.boolean("truncate", True), attention_factor=_attention_factor(scaling, factor),
    )  # fmt: skip


def _longrope(base: Rope, scaling: ConfigReader, max_positions: int) -> Rope:
    """Two sets of divisors, and LongRoPE's temperature (2402.13753) by default."""
    short, long = (
        scaling.numbers(key, base.dim // 2, low=1e-3, high=_MAX_FACTOR)
        for key in ("short_factor", "long_factor")
    )
    factor = scaling.number("factor", max_positions / base.original_max, low=1e-3, high=_MAX_FACTOR)
    temperature = 1.0
    if factor > 1.0 and base.original_max > 1:
        temperature = math.sqrt(1.0 + math.log(factor) / math.log(base.original_max))
    return replace(
        base, kind="longrope", factor=factor, short_factors=short, long_factors=long,
        attention_factor=scaling.number("attention_factor", temperature, low=1e-3, high=1e3),
    )  # fmt: skip


def softmax_factor(config: ConfigReader, rope: Rope) -> float:
    """The factor of mscale_all_dim on the softmax scale in DeepSeek's models: its temperature for q and for k.

    1 without the key; UnsupportedModelError if the rope is not scaled by YaRN.
    """
    scaling = _parameters(config)
    all_dim = 0.0 if scaling is None else scaling.number("mscale_all_dim", 0.0, low=0.0, high=1e3)
    if scaling is None or not all_dim or rope.kind == "default":
        return 1.0
    if rope.kind != "yarn":
        raise scaling.unsupported("mscale_all_dim", "it needs rope_type 'yarn'")
    return _temperature(rope.factor, all_dim) ** 2


def _attention_factor(scaling: ConfigReader, factor: float) -> float:
    """YaRN's temperature (2309.00071, section 3.4); mscale and mscale_all_dim as DeepSeek defined them."""
    given = scaling.number("attention_factor", None, low=1e-3, high=1e3)
    if given is not None:
        return given
    mscale = scaling.number("mscale", 0.0, low=0.0, high=1e3)
    mscale_all_dim = scaling.number("mscale_all_dim", 0.0, low=0.0, high=1e3)
    if mscale and mscale_all_dim:
        return _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)
    return _temperature(factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


_KINDS: dict[str, Callable[[Rope, ConfigReader, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
