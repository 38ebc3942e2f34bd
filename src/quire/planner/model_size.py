"""A model as calculators see it: a few numbers, from its description alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.program.cost import active_parameters
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.program import Program
from quire.records import dataclass
from quire.spec.config_reader import ConfigReader
from quire.spec.facts import facts_of
from quire.spec.model import ModelSpec, MoE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters in billions; `kv_values`: the numbers that one token adds to the cache, over all layers.

    `width` is that of a feed-forward in the last layer, or of one of its `experts` (0: it has none);
    `expert_b` are the parameters of all experts, in billions.
    """

    params_b: float
    active_b: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    kv_values: int
    max_positions: int
    width: int = 0
    experts: int = 0
    expert_b: float = 0.0


def model_size(spec: ModelSpec, program: Program) -> ModelSize:
    """The numbers of a lowered model. Heads are those of the first layer that has a cache."""
    first = next((layer.mixer for layer in spec.layers if hasattr(layer.mixer, "heads")), None)
    cached = program.kv_layers[0] if program.kv_layers else None
    last = spec.layers[-1].mlp
    whole, active = (
        sum(p.rows * max(p.cols, 1) for p in program.all_params) / 1e9,
        active_parameters(program) / 1e9,
    )
    router = last.router if isinstance(last, MoE) else None
    return ModelSize(
        params_b=whole,
        active_b=active,
        layers=len(spec.layers),
        heads=getattr(first, "heads", 0),
        kv_heads=getattr(first, "kv_heads", 1) if cached else 0,
        head_dim=cached.head_dim if cached else 0,
        hidden=spec.dim,
        kv_values=sum(layer.vectors * layer.head_dim for layer in program.kv_layers),
        max_positions=spec.max_positions,
        width=last.width if last else 0,
        experts=router.experts if router else 0,
        expert_b=(whole - active) * router.experts / (router.experts - router.top_k) if router else 0.0,
    )


def size_of_config(config: Mapping[str, Any]) -> ModelSize:
    """The numbers of a config.json. Raises CheckpointError and UnsupportedModelError as its reading does."""
    spec = facts_of(ConfigReader(dict(config), "config.json", []), None, "").spec
    return model_size(spec, lower(spec, NumberFormats("bf16", "bf16")))
