"""Routes of a server with several models that concern all of them, in place of those of one model."""

from __future__ import annotations

import asyncio
import importlib
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal

import msgspec

from quire.engine.api import EngineState
from quire.routing.traffic import RuleBody
from quire.server.context import ServerContext
from quire.server.control import SleepBody, asked_sleep
from quire.server.dialects.ollama import time_text
from quire.server.dialects.ollama_types import OLLAMA_ERRORS, OllamaDetails, OllamaModel, OllamaModels
from quire.server.errors import ApiError, bad_request, retry_headers, shorten
from quire.server.exchange import Exchange
from quire.server.fleet.admin_bodies import admin_body
from quire.server.fleet.deploy import DeployBody, Deployments
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.managing import managing_routes
from quire.server.fleet.member import Member
from quire.server.fleet.shadows import ShadowReport
from quire.server.query import query_of
from quire.server.routes import NOTHING, PLAIN, Act, Get, HttpRoute
from quire.server.status import READY_PATHS, HealthBody, check_may_look


class FleetModelBody(msgspec.Struct, kw_only=True):
    """One name, and the version of the model that answers it. What is None is known once the model was loaded.
    `memory` is its share in bytes, `borrowed` what it has of other models' shares, `lent` what they have of its own.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None
    state: str
    version: int
    memory: int
    borrowed: int = 0
    lent: int = 0
    max_model_len: int | None = None
    architecture: str | None = None
    vocab_size: int | None = None
    config_sha256: str | None = None
    template_sha256: str | None = None
    adapter_sha256: str | None = None
    error: str | None = None
    permission: list[Any] = []


class FleetModelList(msgspec.Struct, kw_only=True):
    """Answer to GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[FleetModelBody]


def model_body(name: str, member: Member) -> FleetModelBody:
    """What is known of a name."""
    served = member.served
    body = FleetModelBody(
        id=name, created=member.created, root=served.model, parent=None if name == served.name else served.name,
        state=member.state, version=member.version, memory=served.config.limits.memory or 0,
        error=None if member.failure is None else shorten(str(member.failure)),
    )  # fmt: skip
    if member.memory is not None:
        body.borrowed, body.lent = member.memory.borrowed, member.memory.lent
    if member.loaded:
        card = member.engine.card
        body.max_model_len, body.architecture, body.vocab_size = (
            card.max_model_len,
            card.architecture,
            card.vocab_size,
        )
        body.config_sha256, body.template_sha256 = card.config_sha256, card.template_hash
    return body


async def _health(fleet: Fleet, _: ServerContext, __: Exchange) -> HealthBody:
    """200 when the server takes requests for its models, loaded or not."""
    if fleet.state is not EngineState.READY:
        raise ApiError(503, f"the server is {fleet.state}", code=str(fleet.state), headers=retry_headers(1.0))
    return HealthBody(str(fleet.state))


async def _models(fleet: Fleet, _: ServerContext, exchange: Exchange) -> FleetModelList:
    """All names that the tenant may use."""
    tenant, bodies = fleet.tenants.get(exchange.tenant), _bodies(fleet)
    found = []
    for name, body in bodies.items():
        allowed = tenant.models if body.adapter_sha256 is None else tenant.adapters
        if allowed is None or name in allowed:
            found.append(body)
    return FleetModelList(data=found)


def _bodies(fleet: Fleet) -> dict[str, FleetModelBody]:
    """What is known of every name: of models, of rules, and of the adapters of models."""
    found = {name: model_body(name, member) for name, member in fleet.names()}
    for name, of in fleet.current.items():
        member = fleet.members[of]
        for adapter, version in member.adapters.items():
            if adapter not in found:
                found[adapter] = body = model_body(adapter, member)
                body.parent = name
                if version is not None:
                    body.created, body.root = version.created, version.path
                    body.adapter_sha256 = version.digest
    return found


async def _model(fleet: Fleet, _: ServerContext, exchange: Exchange) -> FleetModelBody:
    """One name."""
    asked = exchange.path.removeprefix("/v1/models/")
    target = fleet.route(asked, asked).target  # also of a version, as chat@2
    return _bodies(fleet).get(asked) or model_body(asked, fleet.members[target])


async def _tags(fleet: Fleet, _: ServerContext, exchange: Exchange) -> OllamaModels:
    """The names in Ollama's form; of `ps` those that are loaded."""
    found, running = [], exchange.path.endswith("/ps")
    for name, body in _bodies(fleet).items():
        if running and body.state != "ready":
            continue
        details = OllamaDetails(body.architecture or "", [body.architecture] if body.architecture else [])
        entry = OllamaModel(
            name=name, model=name, modified_at=time_text(datetime.fromtimestamp(body.created, UTC)),
            digest=body.adapter_sha256 or body.config_sha256 or "", details=details,
            context_length=body.max_model_len or 0,
        )  # fmt: skip
        if running:
            entry.size, entry.size_vram = body.memory, 0
            entry.expires_at = time_text(_leaves(fleet, fleet.members[fleet.route(name, name).target]))
        found.append(entry)
    return OllamaModels(found)


def _leaves(fleet: Fleet, member: Member) -> datetime:
    """When a model leaves if no request comes; one that stays, in a hundred years."""
    seconds = fleet.keeps(member)
    if seconds < 0:
        return datetime.now(UTC) + timedelta(days=36_525)
    passed = 0.0 if member.active else time.monotonic() - member.used
    return datetime.now(UTC) + timedelta(seconds=min(seconds - passed, 1e9))


async def _metrics(fleet: Fleet, _: ServerContext, __: Exchange) -> bytes:
    """Metrics of all models that were loaded, by `model_name`, and of the process."""
    module = await asyncio.to_thread(importlib.import_module, "quire.server.exposition")
    texts = []
    for member in fleet.members.values():
        context = member.service.context
        if member.loaded or member is fleet.default:
            context.exposition = context.exposition or module.Exposition(context.metrics)
            texts.append(context.exposition.render())
    return merged(texts)


def merged(texts: list[bytes]) -> bytes:
    """Several texts in Prometheus' format as one: each family once, each series as in the first text that has it."""
    families: dict[bytes, dict[bytes, bytes]] = {}
    for text in texts:
        family = b""
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                family = line.split(b" ", 3)[2]
            series = line if line.startswith(b"#") else line.rpartition(b" ")[0]
            families.setdefault(family, {}).setdefault(series, line)
    return b"".join(line + b"\n" for lines in families.values() for line in lines.values())


def _asked_member(fleet: Fleet, exchange: Exchange, *known: str) -> Member:
    """The member that a path for administrators names: a model's version that answers, or one with its number."""
    name = query_of(exchange.scope["query_string"], ("model", *known)).get("model")
    return fleet.default if name is None else fleet.members[fleet.route(name, "").target]


async def _sleep(fleet: Fleet, _: ServerContext, exchange: Exchange) -> bytes:
    """Put a model to sleep until it is woken up, or with hold=false until the next request."""
    member = _asked_member(fleet, exchange, "level", "mode", "hold")
    level, seconds = asked_sleep(exchange, fleet.config.shutdown_timeout, "model", "hold")
    hold = query_of(exchange.scope["query_string"]).get("hold", "true")
    if hold not in {"true", "false"}:
        raise bad_request("hold", f"hold: {shorten(hold, 20)!r} is not true or false")
    await member.sleep(level, seconds, held=hold == "true")
    return NOTHING


async def _wake_up(fleet: Fleet, _: ServerContext, exchange: Exchange) -> bytes:
    """Wake a model up, or load it."""
    await _asked_member(fleet, exchange).load()
    return NOTHING


async def _is_sleeping(fleet: Fleet, _: ServerContext, exchange: Exchange) -> SleepBody:
    """Whether a model sleeps."""
    return SleepBody(_asked_member(fleet, exchange).held)


async def _debug_memory(fleet: Fleet, context: ServerContext, exchange: Exchange) -> dict[str, Any]:
    """The bound, the shares, and what the engine of each model holds."""
    check_may_look(context, exchange)
    loaded = [member for member in fleet.members.values() if member.state == "ready"]
    models = {member.id: {"pid": member.engine.pid, **await member.engine.memory()} for member in loaded}
    shares = fleet.shares
    return {
        "bound": shares.bound,
        "server": dict(shares.server),
        "shares": dict(shares.models),
        "models": models,
        "borrowed": {member.id: member.memory.borrowed for member in loaded if member.memory is not None},
        "at_most": fleet.ledger.used + sum(shares.server.values()),
    }


class VersionsBody(msgspec.Struct):
    """The versions by id, the names with what they stand for, and what shadows have found by pair of versions."""

    versions: dict[str, FleetModelBody]
    current: dict[str, str]
    rules: dict[str, Any]
    shadows: dict[str, ShadowReport]
    free: int


class NameBody(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a model."""

    name: str


async def _versions(fleet: Fleet, _: ServerContext, __: Exchange) -> VersionsBody:
    """All versions, rules and reports."""
    reports = {" ".join(pair): found for pair, found in fleet.shadows.reports.items()}
    return VersionsBody(
        {of: model_body(member.served.name, member) for of, member in fleet.members.items()},
        fleet.current, msgspec.to_builtins(fleet.extra), reports, fleet.shares.free,
    )  # fmt: skip


def _admin_routes(fleet: Fleet, made: Deployments) -> tuple[HttpRoute, ...]:
    _body = partial(admin_body, fleet.config)

    async def deploy(_: ServerContext, exchange: Exchange) -> FleetModelBody:
        member = await made.deploy(await _body(exchange, DeployBody), exchange.watch)
        return model_body(member.served.name, member)

    async def back(_: ServerContext, exchange: Exchange) -> FleetModelBody:
        member = await made.back((await _body(exchange, NameBody)).name)
        return model_body(member.served.name, member)

    async def remove(_: ServerContext, exchange: Exchange) -> None:
        await made.remove(exchange.path.removeprefix("/admin/models/"))
        await exchange.respond(200, b"{}")

    async def rules(context: ServerContext, exchange: Exchange) -> VersionsBody:
        await made.set_rules(await _body(exchange, dict[str, RuleBody]))
        return await _versions(fleet, context, exchange)

    return (
        Get(
            path="/admin/models", summary="The versions and their traffic", tag="admin",
            handler=partial(_versions, fleet), response=VersionsBody, admin=True, api="",
        ),
        Act(
            verb="POST", path="/admin/models", summary="Deploy a version", tag="admin", handler=deploy,
            response=FleetModelBody, admin=True, api="",
        ),
        Act(
            verb="POST", path="/admin/models/back", summary="Switch back to the version before", tag="admin",
            handler=back, response=FleetModelBody, admin=True, api="",
        ),
        Act(
            verb="DELETE", path="/admin/models/{}", rest="version", summary="Drain and remove a version", tag="admin",
            handler=remove, response=dict, admin=True, api="",
        ),
        Act(
            verb="PUT", path="/admin/traffic", summary="Replace all traffic rules", tag="admin", handler=rules,
            response=VersionsBody, admin=True, api="",
        ),
    )  # fmt: skip


def fleet_routes(fleet: Fleet) -> tuple[HttpRoute, ...]:
    """The routes of a server with several models, over its models."""
    deployments = Deployments(fleet)
    return (
        Get(
            path="/v1/models", summary="The served models", tag="models", handler=partial(_models, fleet),
            response=FleetModelList, api="",
        ),
        Get(
            path="/v1/models/{}", rest="model", summary="One served model", tag="models",
            handler=partial(_model, fleet), response=FleetModelBody, api="",
        ),
        *(
            Act(
                verb=verb, path=path, summary="200 when requests are taken", tag="status",
                handler=partial(_health, fleet), response=HealthBody, api="", open=True,
            )
            for verb, path in (*(("GET", path) for path in READY_PATHS), ("POST", "/ping"))
        ),
        *(
            Get(
                path=path, summary="The served models, in Ollama's form", tag="ollama", handler=partial(_tags, fleet),
                response=OllamaModels, api="ollama", errors=OLLAMA_ERRORS,
            )
            for path in ("/api/tags", "/api/ps")
        ),
        Get(
            path="/metrics", summary="Prometheus metrics", tag="status", handler=partial(_metrics, fleet), response=str,
            api="", media=b"text/plain; version=0.0.4; charset=utf-8",
        ),
        Get(
            path="/debug/memory", summary="The shares of the memory", tag="status",
            handler=partial(_debug_memory, fleet), response=dict, api="",
        ),
        Act(
            verb="POST", path="/sleep", summary="Put a model to sleep", tag="admin", handler=partial(_sleep, fleet),
            response=str, media=PLAIN, admin=True, query=("level", "mode", "model", "hold"),
        ),
        Act(
            verb="POST", path="/wake_up", summary="Wake a model up", tag="admin", handler=partial(_wake_up, fleet),
            response=str, media=PLAIN, admin=True, query=("model",),
        ),
        Get(
            path="/is_sleeping", summary="Whether a model sleeps", tag="admin", handler=partial(_is_sleeping, fleet),
            response=SleepBody, admin=True,
        ),
        *_admin_routes(fleet, deployments),
        *managing_routes(fleet, deployments),
    )  # fmt: skip
