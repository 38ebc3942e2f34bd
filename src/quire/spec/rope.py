"""Rotary frequencies of every scaling kind, as float32 numpy tables.

Sources: linear 2306.15595; NTK-aware dynamic scaling; Llama 3.1 frequency bands (Llama 3 model card);
YaRN 2309.00071; LongRoPE 2402.13753. Arithmetic is float32 in transformers' order, so that tables agree to the last
bits; powers are computed in float64 and rounded, so that they are the same on every CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.spec.model import Rope

F32 = npt.NDArray[np.float32]


def inverse_frequencies(rope: Rope, max_len: int) -> F32:
    """Inverse frequency of each rotated pair, float32 [dim/2].

    `max_len` is the longest sequence of the engine. Only `dynamic` and `longrope` depend on it: their base or factors
    are chosen once from max_len, so that the rotation of a token never depends on the current length of its sequence
    (docs/decisions/0002-dynamic-rope.md).
    """
    match rope.kind:
        case "default":
            return _base(rope.theta, rope.dim)
        case "linear":
            return _base(rope.theta, rope.dim) / np.float32(rope.factor)
        case "dynamic":
            return _dynamic(rope, max_len)
        case "llama3":
            return _llama3(rope)
        case "yarn":
            return _yarn(rope)
        case "longrope":
            factors = rope.long_factors if max_len > rope.original_max else rope.short_factors
            return _long(rope, factors)


def cos_sin(rope: Rope, max_len: int) -> tuple[F32, F32]:
    """cos and sin of position × frequency for positions 0 … max_len-1, each float32 [max_len, dim/2]."""
    angles = np.arange(max_len, dtype=np.float32)[:, None] * inverse_frequencies(rope, max_len)[None, :]
    factor = np.float32(rope.attention_factor)
    return np.cos(angles) * factor, np.sin(angles) * factor


def _powers(theta: float, dim: int) -> F32:
    """theta^(2k/dim) with a float32 exponent, correctly rounded: float32 `power` differs between CPUs."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)


def _base(theta: float, dim: int) -> F32:
    return np.reciprocal(_powers(theta, dim))


def _dynamic(rope: Rope, max_len: int) -> F32:
    length = max(max_len, rope.original_max)
    stretch = rope.factor * length / rope.original_max - (rope.factor - 1)
    return _base(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim)


def _long(rope: Rope, factors: Sequence[float]) -> F32:
    out: F32 = np.reciprocal(np.array(factors, np.float32) * _powers(rope.theta, rope.dim))
    return out


def _llama3(rope: Rope) -> F32:
    freq = _base(rope.theta, rope.dim)
    factor = np.float32(rope.factor)
    # torch divides a number by a tensor as reciprocal times number: two roundings.
    wavelength = np.reciprocal(freq) * np.float32(2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = np.reciprocal(wavelength) * np.float32(rope.original_max)
    smooth = (turns - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * freq / factor + smooth * freq
    is_long = wavelength > np.float32(rope.original_max / low)
    is_short = wavelength < np.float32(rope.original_max / high)
    return np.where(is_long, freq / factor, np.where(is_short, freq, blended)).astype(np.float32)


def _yarn(rope: Rope) -> F32:
    def correction(rotations: float) -> float:
        turns = rope.original_max / (rotations * 2 * math.pi)
        return (rope.dim * math.log(turns)) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    pair = np.arange(rope.dim // 2, dtype=np.float32)
    ramp = np.clip((pair - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = 1 - ramp  # 1 if a pair rotates fast enough to extrapolate
    powers = _powers(rope.theta, rope.dim)
    interpolated = np.reciprocal(np.float32(rope.factor) * powers)
    out: F32 = interpolated * (1 - keep) + np.reciprocal(powers) * keep
    return out
