"""Code that families with experts share: the keys of the router, and the dense layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import MAX_LAYERS
from quire.spec.model import ModelSpec, MoE, Router

MAX_EXPERTS = 1024
MAX_TOP_K = 64
# Keys of other routers: key -> values that mean a plain softmax router.
_OTHER_ROUTERS: dict[str, tuple[object, ...]] = {
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "routed_scaling_factor": (None, 1),
}


def read_experts(config: ConfigReader, default: int, *, low: int = 1) -> int:
    """`num_experts` or `num_local_experts`, which transformers 5 writes for both."""
    names = [key for key in ("num_experts", "num_local_experts") if config.has(key)]
    found = [config.integer(key, low=low, high=MAX_EXPERTS) for key in names]
    if len(set(found)) > 1:
        raise config.error("num_experts", f"{found[0]} contradicts num_local_experts = {found[1]}")
    return found[0] if found else default


def read_top_k(config: ConfigReader, experts: int, default: int) -> int:
    """`num_experts_per_tok`, at most the number of experts."""
    key = "num_experts_per_tok"
    top_k = config.integer(key, default, high=MAX_TOP_K)
    if top_k > experts:
        raise config.error(key, f"{top_k} is more than the {experts} experts")
    return top_k


def softmax_router(config: ConfigReader, experts: int, top_k: int, *, renormalise: bool) -> Router:
    """Softmax over all experts, then the best `top_k`. Keys of other routers are refused."""
    for key, plain in _OTHER_ROUTERS.items():
        if config.values.get(key) not in plain:
            raise config.unsupported(key, "the router of this model type is a softmax over all experts")
    return Router(experts, read_top_k(config, experts, top_k), renormalise=renormalise)


def dense_layers(config: ConfigReader, layers: int) -> set[int]:
    """Layers without experts: `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    step = config.integer("decoder_sparse_step", 1, high=MAX_LAYERS)
    listed = config.integers("mlp_only_layers", low=0, high=layers - 1)
    return set(listed) | {i for i in range(layers) if (i + 1) % step}


def with_experts(spec: ModelSpec, moe: MoE, dense: Collection[int] = ()) -> ModelSpec:
    """The spec with experts in every layer but the dense ones."""
    layers = (x if i in dense else replace(x, mlp=moe) for i, x in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))
