"""Live control for administrators: the configuration, the tenants, and what they have used."""

from __future__ import annotations

import csv
import io
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire.config.live import LiveConfig
from quire.config.tenants import Prices, TenantsFileError
from quire.engine.usage_ledger import HOUR, Used
from quire.server.context import ConfigChange, ServerContext
from quire.server.errors import ApiError, bad_request, shorten
from quire.server.exchange import Exchange
from quire.server.logs import log
from quire.server.query import query_of
from quire.server.routes import Act, Get, HttpRoute

_PROBE_TOKENS = 512  # of the prompt whose time to the first token a dry run predicts
_PERIODS = {"hour": HOUR, "day": 24 * HOUR, "total": 0}
_COLUMNS = (
    "start", "tenant", "tag", "prompt_tokens", "cached_tokens", "generation_tokens", "compute_seconds",
    "kv_byte_seconds", "cost", "currency",
)  # fmt: skip


class ConfigBody(msgspec.Struct, kw_only=True):
    """The part of the configuration that can be changed, and its last changes: when, by whom, and what."""

    config: dict[str, Any]
    changes: list[ConfigChange]


class ChangedBody(msgspec.Struct, kw_only=True):
    """The configuration after a change, or as it would be; `effect` has predictions for the requests of this moment."""

    dry_run: bool
    changed: dict[str, Any]
    config: dict[str, Any]
    effect: dict[str, dict[str, float] | None]


class TenantBody(msgspec.Struct, kw_only=True):
    """A tenant of the file, without its keys, and what it has of the KV cache now."""

    name: str
    keys: int
    weight: float
    classes: list[str]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    tokens_per_day: int | None
    cache_share: float
    cache_domain: str
    cache_blocks: int
    models: list[str] | None
    adapters: list[str] | None
    admin: bool


class TenantsBody(msgspec.Struct, kw_only=True):
    """All tenants of the file."""

    tenants: list[TenantBody]


class ReloadedBody(msgspec.Struct, kw_only=True):
    """How many tenants were read."""

    tenants: int


class UsageRow(msgspec.Struct, kw_only=True):
    """What a tenant used under a tag in a period, which begins at `start`; `cost` where there are prices."""

    start: str
    tenant: str
    tag: str
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    compute_seconds: float
    kv_byte_seconds: float
    cost: float | None
    currency: str


class UsageReport(msgspec.Struct, kw_only=True):
    """What was used by period, tenant and tag, by hour, day or in all."""

    period: str
    rows: list[UsageRow]


def _shown(live: LiveConfig, shares: Mapping[str, float]) -> dict[str, Any]:
    return asdict(live) | {"cache_shares": dict(shares)}


async def get_config(context: ServerContext, _: Exchange) -> ConfigBody:
    """The part of the configuration that can be changed."""
    config = _shown(context.engine.live, context.tenants.shares)
    return ConfigBody(config=config, changes=list(context.changes))


async def patch_config(context: ServerContext, exchange: Exchange) -> ChangedBody:
    """Change some of it, all or nothing; with `dry_run` only say what would come of it. Raises ApiError 400."""
    given = query_of(exchange.scope["query_string"], ("dry_run", "model"))
    dry = given.get("dry_run", "false").lower()
    if dry not in {"true", "false", "1", "0"}:
        raise bad_request("dry_run", "dry_run: must be true or false")
    raw = await exchange.body(context.config.max_body_bytes, context.config.body_timeout)
    try:
        changes = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(None, f"the body is not a JSON object of options: {error}") from None
    async with context.configuring:
        return await _change(context, exchange, changes, dry=dry in {"true", "1"})


async def _change(
    context: ServerContext, exchange: Exchange, changes: dict[str, Any], *, dry: bool
) -> ChangedBody:
    engine, tenants = context.engine, context.tenants
    before, shares = engine.live, tenants.shares
    try:
        after = before.changed(changes)
        new = {**after.cache_shares} if "cache_shares" in changes else {}
        after = replace(after, cache_shares=tenants.floors(new))
        _check_start(context, after)
        if not dry:
            await engine.configure(after)
    except ValueError as error:
        name = str(error).partition(":")[0]
        raise bad_request(name if name in changes else None, shorten(str(error))) from None
    effect = {
        name: _rounded(engine.predict(live, _PROBE_TOKENS))
        for name, live in (("before", before), ("after", after))
    }
    changed = {
        name: value
        for name, value in asdict(after).items()
        if name != "cache_shares" and value != getattr(before, name)
    }
    if new:
        changed["cache_shares"] = new
    shares = {name: share for name, share in (shares | new).items() if share}
    if not dry:
        tenants.set_shares(new)
        logging.getLogger("quire").setLevel(getattr(logging, after.log_level.upper()))
        if changed:
            _note(context, exchange, changed)
    return ChangedBody(dry_run=dry, changed=changed, config=_shown(after, shares), effect=effect)


def _check_start(context: ServerContext, live: LiveConfig) -> None:
    """Raise ValueError for a value beyond what the engine was started with, as the engine would, also in a dry run."""
    first = context.engine.first_live
    for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("max_draft_tokens", 0)):
        value, most = getattr(live, name), getattr(first, name)
        if not least <= value <= most:
            raise ValueError(
                f"{name}: {value} is not in [{least}, {most}], which the engine was started with"
            )


def _rounded(found: Mapping[str, float] | None) -> dict[str, float] | None:
    return None if found is None else {name: round(value, 6) for name, value in found.items()}


def _note(context: ServerContext, exchange: Exchange, changed: dict[str, Any]) -> None:
    """Write down who changed what, and when."""
    who = str(exchange.details.get("admin", "an administrator"))
    context.changes.append(ConfigChange(_time(time.time()), who, changed))
    text = ", ".join(f"{name}={value}" for name, value in changed.items())
    log.info("%s changed the configuration: %s", who, text, extra={"details": {"id": exchange.request_id}})


async def get_tenants(context: ServerContext, _: Exchange) -> TenantsBody:
    """The tenants of the file."""
    directory, blocks = context.tenants, context.engine.stats.tenant_blocks
    shares = directory.shares
    return TenantsBody(tenants=[
        TenantBody(
            name=one.name, keys=len(one.keys), weight=one.weight, classes=list(one.classes),
            requests_per_minute=one.requests_per_minute, tokens_per_minute=one.tokens_per_minute,
            concurrent_requests=one.concurrent_requests, tokens_per_day=one.tokens_per_day,
            cache_share=shares.get(one.name, 0.0), cache_domain=one.cache_domain,
            cache_blocks=blocks.get(one.domain, 0), models=_sorted(one.models), adapters=_sorted(one.adapters),
            admin=one.admin,
        )
        for one in directory.all.by_name.values()
    ])  # fmt: skip


def _sorted(names: frozenset[str] | None) -> list[str] | None:
    return None if names is None else sorted(names)


async def reload_tenants(context: ServerContext, exchange: Exchange) -> ReloadedBody:
    """Read the file of tenants again. Raises ApiError 400, and changes nothing, if it is wrong."""
    try:
        count = context.tenants.reload()
    except TenantsFileError as error:
        log.error("the file of tenants was not reloaded, still using the old one: %s", error)
        raise ApiError(400, str(error), code="invalid_tenants_file") from None
    log.info("tenants: %d read, asked for by %s", count, exchange.details.get("admin", "an administrator"))
    return ReloadedBody(tenants=count)


async def get_usage(context: ServerContext, exchange: Exchange) -> UsageReport | None:
    """What tenants have used, by period. Raises ApiError 400 for wrong parameters."""
    given = query_of(exchange.scope["query_string"], ("from", "to", "period", "format", "model"))
    period, form = given.get("period", "total"), given.get("format", "json")
    if period not in _PERIODS:
        raise bad_request("period", f"period: {shorten(period, 20)!r} is not one of {', '.join(_PERIODS)}")
    if form not in {"json", "csv"}:
        raise bad_request("format", f"format: {shorten(form, 20)!r} is not json or csv")
    start, end = _moment("from", given.get("from"), 0.0), _moment("to", given.get("to"), float("inf"))
    rows = list(_rows(context, start, end, _PERIODS[period]))
    if form == "json":
        return UsageReport(period=period, rows=rows)
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(_COLUMNS)
    table.writerows(
        ["" if value is None else value for value in msgspec.structs.astuple(row)] for row in rows
    )
    await exchange.respond(200, text.getvalue().encode(), content_type=b"text/csv; charset=utf-8")
    return None


def _rows(context: ServerContext, start: float, end: float, seconds: int) -> Iterator[UsageRow]:
    ledger, tenants = context.engine.ledger, context.tenants
    whole = seconds or 2**40  # one period that has all hours
    for begins, (account, tag), used in ledger.periods(start, end, whole):
        prices = tenants.get(account).prices or tenants.all.prices
        yield UsageRow(
            start=_time(begins) if seconds else "", tenant=tenants.label(account), tag=tag,
            prompt_tokens=used.prompt, cached_tokens=used.cached, generation_tokens=used.generated,
            compute_seconds=round(used.seconds, 6), kv_byte_seconds=round(used.byte_seconds, 3),
            cost=None if prices is None else round(_cost(prices, used), 6),
            currency="" if prices is None else prices.currency,
        )  # fmt: skip


def _cost(prices: Prices, used: Used) -> float:
    return prices.cost(used.prompt, used.cached, used.generated, used.seconds, used.byte_seconds)


def _moment(name: str, text: str | None, default: float) -> float:
    """Seconds since 1970 of a number, or of a date like 2026-01-31 or 2026-01-31T12:00Z; UTC without a zone."""
    if text is None:
        return default
    try:
        if text.isascii() and text.isdigit() and len(text) < 12:
            return float(text)
        made = datetime.fromisoformat(text)
        return (made if made.tzinfo is not None else made.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise bad_request(name, f"{name}: {shorten(text, 40)!r} is no time like 2026-01-31T12:00Z") from None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


ROUTES: tuple[HttpRoute, ...] = (
    Get(
        path="/admin/config", summary="What of the configuration can be changed", tag="admin", handler=get_config,
        response=ConfigBody, admin=True, api="",
    ),
    Act(
        verb="PATCH", path="/admin/config", summary="Change the configuration", tag="admin", handler=patch_config,
        response=ChangedBody, admin=True, api="", query=("dry_run",),
    ),
    Get(
        path="/admin/tenants", summary="The tenants of the file", tag="admin", handler=get_tenants,
        response=TenantsBody, admin=True, api="",
    ),
    Act(
        verb="POST", path="/admin/tenants/reload", summary="Read the file of tenants again", tag="admin",
        handler=reload_tenants, response=ReloadedBody, admin=True, api="",
    ),
    Act(
        verb="GET", path="/admin/usage", summary="What tenants have used", tag="admin", handler=get_usage,
        response=UsageReport, admin=True, api="", query=("from", "to", "period", "format"),
    ),
)  # fmt: skip
