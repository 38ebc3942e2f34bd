"""Several adapters with weights as one of the sum of their ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from quire.lora.adapter import F32, Adapter, LowRank
from quire.quant.floats import floats
from quire.types import CheckpointError


def mix(parts: Sequence[tuple[Adapter, float]]) -> Adapter:
    """What adds Σ weight · (W' - W), W' being W with one adapter alone, without magnitudes. Numbers may be infinite.

    Raises CheckpointError for an adapter with whole matrices: their difference from the base is not low in rank.
    """
    for adapter, _ in parts:
        if adapter.modules_to_save:
            key = min(adapter.modules_to_save)
            raise CheckpointError(
                f"adapter {adapter.name}: modules_to_save: {key}: whole weights cannot be combined with a weight"
            )
    made: dict[str, LowRank] = {}
    for module in dict.fromkeys(module for adapter, _ in parts for module in adapter.parts):
        lows = [(adapter.parts[module], weight) for adapter, weight in parts if module in adapter.parts]
        gains = [low.gain * np.float32(weight) for low, weight in lows if low.gain is not None]
        gain = sum(gains[1:], gains[0]) if gains else None
        a = np.concatenate([floats(low.a) for low, _ in lows])
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            b = np.concatenate([_scaled(low, weight, gain) for low, weight in lows], axis=1)
        made[module] = LowRank(a, b, 1.0, gain=gain)
    name = " + ".join(f"{weight:g} × {adapter.name}" for adapter, weight in parts)
    content = repr([(adapter.digest, weight) for adapter, weight in parts])
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Adapter(name, digest, max(low.rank for low in made.values()), made, {})


def _scaled(low: LowRank, weight: float, gain: F32 | None) -> F32:
    """B of one of several adapters, such that the gain of all makes of it what its own does."""
    b: F32 = floats(low.b) * np.float32(low.scale * weight)
    if gain is None:
        return b
    own = np.zeros_like(gain) if low.gain is None else low.gain
    found: F32 = b * ((1 + own) / (1 + gain))[:, None]
    return found
