"""`quire inspect`: the packed copy of a model's weights that the next start would map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.types import CheckpointError
from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.config.schema import ResolvedConfig
    from quire.engine.build.opening import Model
    from quire.program.program import Program


def report(model: Model, program: Program, config: ResolvedConfig) -> dict[str, Any] | None:
    """The packed copy that a start would map; None if the model is not cached. `bytes` is 0 if it is missing."""
    from quire.engine.build.assemble import weight_origin
    from quire.engine.build.load_weights import packed_place
    from quire.executor.kinds import executor_kind
    from quire.program.memory import weight_bytes

    if weight_bytes(program) > config.asked.loading.weight_cache_size:
        return None
    try:
        place = packed_place(weight_origin(model), program, config, executor_kind(config).layout)
    except CheckpointError:  # config files alone can be inspected
        return None
    if place is None:
        return None
    sizes = place.cache.sizes()
    return {
        "path": str(place.path),
        "bytes": sizes.get(place.path.name, 0),
        "cache_bytes": sum(sizes.values()),
        "cache_limit": place.cache.limit,
    }


def line(packed: dict[str, Any] | None) -> str:
    """The report in readable form."""
    if packed is None:
        return "packed weights are not cached for this model and these options"
    size, used = packed["bytes"], format_size(packed["cache_bytes"])
    here = f"{format_size(size)} at" if size else "none yet; the first start writes"
    return f"packed weights: {here} {packed['path']} ({used} of {format_size(packed['cache_limit'])} used)"
