"""Adapters as llama-server numbers them: in the order in which they were loaded."""

from __future__ import annotations

import math

import msgspec

from quire.server.answering import generating_model, note_served
from quire.server.context import ServerContext
from quire.server.dialects.llama_server_types import LLAMA_SERVER_ERRORS, LlamaServerRequest
from quire.server.errors import bad_request
from quire.server.exchange import Exchange
from quire.server.routes import Get, HttpRoute
from quire.server.served import Served
from quire.types import CheckpointError


class NumberedAdapter(msgspec.Struct):
    """An adapter. `scale` is 0: no request has it that does not ask for it."""

    id: int
    name: str
    path: str
    scale: float = 0.0


async def adapters(context: ServerContext, _: Exchange) -> list[NumberedAdapter]:
    """The adapters and their numbers."""
    context.card()
    loaded = enumerate(context.engine.adapters.values())
    return [NumberedAdapter(number, version.name, version.path) for number, version in loaded]


async def served_with(context: ServerContext, exchange: Exchange, body: LlamaServerRequest) -> Served:
    """What a request is for: a name, or adapters by number with scales, which are summed. Raises ApiError."""
    names, wanted = list(context.engine.adapters), {}
    for one in body.lora or ():
        if not 0 <= one.id < len(names):
            raise bad_request(
                "lora", f"lora: {one.id} is not the number of an adapter; there are {len(names)}"
            )
        if not math.isfinite(one.scale):
            raise bad_request("lora", "lora: a scale must be a finite number")
        wanted[names[one.id]] = one.scale
    parts = [(name, scale) for name, scale in sorted(wanted.items()) if scale]
    if not parts:
        return generating_model(context, exchange, body.model)
    if body.model is not None and context.find(body.model).digest:
        raise bad_request("lora", f"lora: the model {body.model!r:.200} has an adapter already")
    if len(parts) == 1 and parts[0][1] == 1:
        return generating_model(context, exchange, parts[0][0])
    try:
        version, release = await context.engine.mix_adapters(parts)
    except CheckpointError as error:
        raise bad_request("lora", f"lora: {error}") from None
    exchange.held.keep(release)
    return note_served(context, exchange, Served(context.model(body.model), version))


ROUTES: tuple[HttpRoute, ...] = (
    Get(
        path="/lora-adapters", summary="Adapters and their numbers, in llama-server's form", tag="llama-server",
        handler=adapters, response=list[NumberedAdapter], api="llama-server", errors=LLAMA_SERVER_ERRORS,
    ),
)  # fmt: skip
