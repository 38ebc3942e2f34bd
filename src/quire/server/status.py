"""Endpoints for probes, dashboards and clients that start: health, models, version, metrics."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
from typing import Any, Literal

import msgspec

from quire import __version__
from quire.engine.api import EngineState, ModelCard
from quire.server.context import ServerContext
from quire.server.errors import ApiError, retry_headers, shorten
from quire.server.exchange import Exchange
from quire.server.routes import Act, Get, HttpRoute
from quire.server.served import Served


class HealthBody(msgspec.Struct):
    """State of the engine for probes."""

    status: str


class VersionBody(msgspec.Struct):
    """The version of Quire."""

    version: str


class MemoryBody(msgspec.Struct):
    """The memory bound, the plan by part, what each process holds by part, and the request pools, in bytes."""

    bound: int
    planned: dict[str, int]
    resident: int
    processes: dict[str, dict[str, int]]
    requests: dict[str, dict[str, int]]


class ModelBody(msgspec.Struct, kw_only=True):
    """One served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    version: str
    max_model_len: int
    architecture: str
    vocab_size: int
    config_sha256: str
    adapter_sha256: str | None
    template_sha256: str | None
    permission: list[Any] = []


class ModelList(msgspec.Struct, kw_only=True):
    """Answer to GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelBody]


async def live(_: ServerContext, _exchange: Exchange) -> HealthBody:
    """200 as long as this process answers."""
    return HealthBody("live")


async def ready(context: ServerContext, _: Exchange) -> HealthBody:
    """200 exactly when the next request would be admitted, otherwise 503 with the state; see api.require_ready."""
    state = context.engine.state
    if state is not EngineState.READY:
        raise ApiError(503, f"the engine is {state}", code=str(state), headers=retry_headers(1.0))
    return HealthBody(str(state))


async def version(_: ServerContext, _exchange: Exchange) -> VersionBody:
    """The version of Quire."""
    return VersionBody(__version__)


async def metrics(context: ServerContext, _: Exchange) -> bytes:
    """Metrics for Prometheus. Their module is imported at the first scrape, in a thread."""
    if context.exposition is None:
        module = await asyncio.to_thread(importlib.import_module, "quire.server.exposition")
        context.exposition = context.exposition or module.Exposition(context.metrics)
    assert context.exposition is not None
    return context.exposition.render()


async def memory(context: ServerContext, exchange: Exchange) -> MemoryBody:
    """What each process holds, by part, and the plan."""
    check_may_look(context, exchange)
    return MemoryBody(**await context.engine.memory(), requests=context.memory.report())


def check_may_look(context: ServerContext, exchange: Exchange) -> None:
    """Raise ApiError 403 for a client on another machine when no API key is set."""
    if not context.has_keys and not _is_local(exchange):
        message = "/debug/memory is available to other machines only when an API key is set"
        raise ApiError(403, message, code="forbidden")


def _is_local(exchange: Exchange) -> bool:
    client = exchange.scope.get("client")  # none on a Unix socket
    if client is None:
        return True
    address = ipaddress.ip_address(client[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


async def models(context: ServerContext, exchange: Exchange) -> ModelList:
    """The served names that the tenant may use."""
    return ModelList(data=_models(context, exchange))


async def model(context: ServerContext, exchange: Exchange) -> ModelBody:
    """One served name. Names may contain slashes."""
    asked = exchange.path.removeprefix("/v1/models/")
    for body in _models(context, exchange):
        if body.id == asked:
            return body
    raise ApiError(
        404, f"model: {shorten(asked, 200)!r} is not served here", code="model_not_found", param="model"
    )


def _models(context: ServerContext, exchange: Exchange) -> list[ModelBody]:
    card, may_use = context.card(), context.tenants.may_use
    return [
        _body(one, card, context.names()[0]) for one in context.served.all() if may_use(exchange.tenant, one)
    ]


def _body(one: Served, card: ModelCard, parent: str) -> ModelBody:
    adapter = one.adapter
    return ModelBody(
        id=one.name,
        created=(adapter or card).created,
        root=card.name if adapter is None else adapter.path,
        parent=None if adapter is None else parent,
        version=one.fingerprint(card),
        max_model_len=card.max_model_len,
        architecture=card.architecture,
        vocab_size=card.vocab_size,
        config_sha256=card.config_sha256,
        adapter_sha256=one.digest or None,
        template_sha256=card.template_hash,
    )


READY_PATHS = ("/health", "/health/ready", "/ping", "/v1/health", "/v2/health/ready")
ROUTES: tuple[HttpRoute, ...] = (
    Get(path="/v1/models", summary="The served models", tag="models", handler=models, response=ModelList, api=""),
    Get(
        path="/v1/models/{}", rest="model", summary="One served model", tag="models", handler=model,
        response=ModelBody, api="",
    ),
    *(
        Get(
            path=path, summary="200 when the engine is ready", tag="status", handler=ready, response=HealthBody, api="",
            open=True,
        )
        for path in READY_PATHS
    ),
    Act(
        verb="POST", path="/ping", summary="200 when the engine is ready", tag="status", handler=ready,
        response=HealthBody, api="", open=True,
    ),
    *(
        Get(
            path=path, summary="200 as long as the process answers", tag="status", handler=live,
            response=HealthBody, api="", open=True,
        )
        for path in ("/health/live", "/v2/health/live")
    ),
    Get(path="/version", summary="Version of Quire", tag="status", handler=version, response=VersionBody, api=""),
    Get(
        path="/metrics", summary="Prometheus metrics", tag="status", handler=metrics, response=str, api="",
        media=b"text/plain; version=0.0.4; charset=utf-8", either=True,
    ),
    Get(
        path="/debug/memory", summary="Memory by part, planned and used", tag="status", handler=memory,
        response=MemoryBody, api="",
    ),
)  # fmt: skip
