"""Adapters of a request by number with scales, as llama-server has them: their sum answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.server.answering import generating_model, note_served
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Exchange
from quire.server.requests import ScaledAdapter
from quire.server.served import Served
from quire.types import CheckpointError


async def served_with(
    context: ServerContext, exchange: Exchange, model: str | None, lora: Sequence[ScaledAdapter] | None
) -> Served:
    """What a request is for: a name, or adapters by number with scales, which are summed. Raises ApiError."""
    if not lora:
        return generating_model(context, exchange, model)
    names, wanted = list(context.engine.adapters), {}
    for one in lora:
        if not 0 <= one.id < len(names):
            raise bad_request(
                "lora", f"lora: {one.id} is not the number of an adapter; there are {len(names)}"
            )
        if not math.isfinite(one.scale):
            raise bad_request("lora", "lora: a scale must be a finite number")
        wanted[names[one.id]] = one.scale
    parts = [(name, scale) for name, scale in sorted(wanted.items()) if scale]
    if not parts:
        return generating_model(context, exchange, model)
    if model is not None and context.find(model, exchange).digest:
        raise bad_request("lora", f"lora: the model {model!r:.200} has an adapter already")
    if len(parts) == 1 and parts[0][1] == 1:
        return generating_model(context, exchange, parts[0][0])
    try:
        version, release = await context.engine.mix_adapters(parts)
    except CheckpointError as error:
        raise bad_request("lora", f"lora: {error}") from None
    exchange.held.keep(release)
    return note_served(context, exchange, Served(context.model(model, exchange), version))
