"""Adapters as llama-server numbers them: in the order in which they were loaded."""

from __future__ import annotations

import msgspec

from quire.server.context import ServerContext
from quire.server.dialects.llama_server_types import LLAMA_SERVER_ERRORS
from quire.server.exchange import Exchange
from quire.server.routes import Get, HttpRoute


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


ROUTES: tuple[HttpRoute, ...] = (
    Get(
        path="/lora-adapters", summary="Adapters and their numbers, in llama-server's form", tag="llama-server",
        handler=adapters, response=list[NumberedAdapter], api="llama-server", errors=LLAMA_SERVER_ERRORS,
    ),
)  # fmt: skip
