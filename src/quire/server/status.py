"""What probes, dashboards and clients at their start ask: health, models, version, metrics."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress

import msgspec

from quire import __version__
from quire.engine.api import EngineState
from quire.server.context import ServerContext
from quire.server.errors import ApiError, retry_headers, shorten
from quire.server.exchange import Exchange
from quire.server.responses import HealthBody, MemoryBody, ModelBody, ModelList, VersionBody

_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


async def live(_: ServerContext, exchange: Exchange) -> None:
    """200 while this process answers."""
    await exchange.respond(200, msgspec.json.encode(HealthBody("live")))


async def ready(context: ServerContext, exchange: Exchange) -> None:
    """200 exactly while the next request would be taken, 503 with the state otherwise; see api.require_ready."""
    state = context.engine.state
    if state is not EngineState.READY:
        raise ApiError(503, f"the engine is {state}", code=str(state), headers=retry_headers(1.0))
    await exchange.respond(200, msgspec.json.encode(HealthBody(str(state))))


async def version(_: ServerContext, exchange: Exchange) -> None:
    """Version of Quire."""
    await exchange.respond(200, msgspec.json.encode(VersionBody(__version__)))


async def metrics(context: ServerContext, exchange: Exchange) -> None:
    """Prometheus exposition. Its module is imported at the first scrape, in a thread."""
    if context.exposition is None:
        module = await asyncio.to_thread(importlib.import_module, "quire.server.exposition")
        context.exposition = context.exposition or module.Exposition(context.metrics)
    assert context.exposition is not None
    await exchange.respond(200, context.exposition.render(), content_type=_METRICS_TYPE)


async def memory(context: ServerContext, exchange: Exchange) -> None:
    """What both processes hold, by part, and what was planned.

    Raises ApiError 403 for a client of another machine while no API key is set.
    """
    if not context.has_keys and not _is_local(exchange):
        message = "without an API key /debug/memory answers clients of this machine alone"
        raise ApiError(403, message, code="forbidden")
    held = MemoryBody(**await context.engine.memory(), requests=context.memory.report())
    await exchange.respond(200, msgspec.json.encode(held))


def _is_local(exchange: Exchange) -> bool:
    client = exchange.scope.get("client")  # none on a Unix socket
    if client is None:
        return True
    address = ipaddress.ip_address(client[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


async def models(context: ServerContext, exchange: Exchange) -> None:
    """The served names."""
    await exchange.respond(200, msgspec.json.encode(ModelList(data=_models(context))))


async def model(context: ServerContext, exchange: Exchange) -> None:
    """One served name. Names may hold slashes."""
    asked = exchange.path.removeprefix("/v1/models/")
    for body in _models(context):
        if body.id == asked:
            await exchange.respond(200, msgspec.json.encode(body))
            return
    raise ApiError(
        404, f"model: {shorten(asked, 200)!r} is not served here", code="model_not_found", param="model"
    )


def _models(context: ServerContext) -> list[ModelBody]:
    card = context.card()
    return [
        ModelBody(
            id=name,
            created=card.created,
            root=card.name,
            max_model_len=card.max_model_len,
            architecture=card.architecture,
            vocab_size=card.vocab_size,
            config_sha256=card.config_sha256,
            template_sha256=card.template_hash,
        )
        for name in context.names()
    ]
