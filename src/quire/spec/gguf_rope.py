"""Translate the rotary embedding of a GGUF file into the rope keys of a config."""

from __future__ import annotations

from quire.spec.families.common import MAX_HEAD_DIM
from quire.spec.gguf_keys import Config, Keys
from quire.spec.rope_config import MAX_POSITIONS

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)


def rope_config(keys: Keys, head_dim: int, *, partial: bool) -> Config:
    """Return the rope keys. `partial`: the family rotates a part of each head by default."""
    config: Config = {}
    theta = keys.number("rope.freq_base")
    if theta is not None:
        config["rope_theta"] = theta
    rotated = keys.integer_or("rope.dimension_count", head_dim, MAX_HEAD_DIM)
    if partial or rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = _scaling(keys)
    if keys.has_tensor(ROPE_FACTORS):
        if scaling is not None:
            raise keys.unsupported("rope.scaling.type", f"the file has {ROPE_FACTORS} as well")
        scaling = _factors(keys)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _factors(keys: Keys) -> Config:
    """One divisor per frequency, at every length: a longrope with two equal lists."""
    factors = _vector(keys, ROPE_FACTORS)
    return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}


def _vector(keys: Keys, name: str) -> list[float]:
    if not keys.has_tensor(name):
        raise keys.error("rope.scaling.type", f"the tensor {name} is missing")
    return [float(number) for number in keys.summary.vector(name)]


def _scaling(keys: Keys) -> Config | None:
    kind = keys.string("rope.scaling.type", "")
    factor = keys.number("rope.scaling.factor")
    old = keys.number("rope.scale_linear")  # files of 2023
    keys.has("rope.scaling.finetuned")
    original = keys.integer_or("rope.scaling.original_context_length", 0, MAX_POSITIONS)
    if kind in {"", "none"} and old not in {None, 0.0, 1.0}:
        kind, factor = "linear", old
    if kind == "longrope" or (kind in {"", "none"} and keys.has_tensor(LONG_FACTORS)):
        return _longrope(keys, original)
    match kind:
        case "" | "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor} if factor not in {None, 0.0, 1.0} else None
        case "yarn":
            scaling: Config = {"rope_type": "yarn", "factor": factor}
            if original:
                scaling["original_max_position_embeddings"] = original
            return scaling | _yarn(keys)
        case _:
            raise keys.unsupported(
                "rope.scaling.type", "implemented kinds are none, linear, yarn and longrope"
            )


def _longrope(keys: Keys, original: int) -> Config:
    """Phi's rope: divisors up to the original context and beyond it; the file has the temperature."""
    scaling: Config = {
        "rope_type": "longrope",
        "short_factor": _vector(keys, SHORT_FACTORS),
        "long_factor": _vector(keys, LONG_FACTORS),
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
    }
    if not original:
        raise keys.error("rope.scaling.original_context_length", "is missing")
    return scaling | {"original_max_position_embeddings": original}


def _yarn(keys: Keys) -> Config:
    found: Config = {}
    for key, name in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
        for spelling in (f"rope.scaling.yarn_{key}", f"rope.scaling.{key}"):
            value = keys.number(spelling)
            if value is not None:
                found[name] = value
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"):
        if keys.number(key, 1.0) != 1.0:
            raise keys.unsupported(key, "only 1 is implemented")
    temperature = keys.number("rope.scaling.yarn_attn_factor")
    if temperature is not None and temperature != 1.0:
        found["attention_factor"] = temperature
    every = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if every:
        found |= {"mscale": 1.0, "mscale_all_dim": every}
    return found
