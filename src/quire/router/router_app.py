"""The ASGI application of a router: checks who asks, chooses a server, and passes its answer on."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from quire.router.backend_server import SPILLED, BackendServer
from quire.router.backends import Backends
from quire.router.forwarding import Forwarding
from quire.router.routed_request import AskedOfServers, asked_of
from quire.router.router_context import RouterContext
from quire.routing import announcing
from quire.server.app import PAGES, ROUTES
from quire.server.dialects.generate_route import shared
from quire.server.errors import ApiError, ClientGoneError, api_error
from quire.server.exchange import Exchange, Receive, Scope, Send
from quire.server.logs import log, log_access
from quire.server.routes import RouteTable

if TYPE_CHECKING:
    from quire.router.semantic_cache import SemanticCache

# What a router answers itself.
_OWN = ("/health", "/ping", "/v1/models", "/metrics", "/router/backends")
_OPEN = ("/health", "/ping", announcing.PATH)
# Files and batches are on one server, which the router cannot find by their ids.
_LOCAL = ("/v1/files", "/v1/batches", "/v1/uploads")
_RESPONSE = "/v1/responses/resp_"


def _reports(backends: Backends, backend: BackendServer) -> dict[str, Any]:
    """Whether a server says what it has cached, and how many blocks that are."""
    follower = backend.follower
    if follower is None or not follower.offered:
        return {"reports": "none"}
    blocks = len(backends.reports.cache(backend.name).blocks)
    return {"reports": "current" if follower.current else "lost", "reported_blocks": blocks}


class RouterApp:
    """Passes requests of clients to servers. Routes for administrators are those of one server: they are not passed."""

    def __init__(self, context: RouterContext) -> None:
        self.context = context
        passed = tuple(
            route for route in ROUTES
            if route.belongs(context.config.api) and not route.admin and route not in PAGES
            and not route.path.startswith(_LOCAL)
        )  # fmt: skip
        self._routes = RouteTable(shared(passed))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        context = self.context
        exchange = Exchange(scope, receive, send, context.memory)
        try:
            await self._answer(exchange)
        except ClientGoneError as gone:
            exchange.details["ended"] = gone.reason
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self._fail(exchange, error)
        finally:
            exchange.held.close()
            context.metrics.count(exchange)
            if context.config.access_log:
                log_access(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        context, path = self.context, exchange.path
        context.access.check_source(exchange)
        exchange.add_headers(context.access.cors_headers(exchange))
        if exchange.method == "OPTIONS":
            methods = [*(self._routes.find(path) or ("GET",))]
            await exchange.respond(204, b"", headers=context.access.preflight_headers(exchange, methods))
            return
        if path not in _OPEN:
            context.access.check_key(exchange)
        if path == announcing.PATH and context.backends.key:
            exchange.handler = path
            await self._note(exchange)
            return
        if path in _OWN:
            exchange.handler = path
            await self._answer_own(exchange)
            return
        methods_of = self._routes.find(path)
        route = (
            None
            if methods_of is None
            else methods_of.get("GET" if exchange.method == "HEAD" else exchange.method)
        )
        if methods_of is None:
            raise ApiError(404, f"{path[:200]}: a router does not pass this", code="not_found")
        if route is None:
            known = ", ".join(methods_of)
            raise ApiError(
                405, f"{exchange.method} is not allowed on this path; use {known}", code="method_not_allowed",
                headers=[(b"allow", known.encode())],
            )  # fmt: skip
        exchange.errors, exchange.handler = route.errors, route.path
        if context.backends.draining:
            raise ApiError(503, "the router is shutting down", code="draining")
        await context.tenants.enter(exchange)
        config = context.config
        body = b""
        if exchange.method not in {"GET", "HEAD", "DELETE"}:
            body = await exchange.body(config.max_body_bytes, config.body_timeout)
        asked = asked_of(exchange, body)
        if path.startswith(_RESPONSE):
            asked.previous_response_id = path.removeprefix("/v1/responses/").partition("/")[0]
        async with exchange.watch() as watch:
            with context.watched(watch):
                if context.semantic is None:
                    await Forwarding(context, exchange, body, asked).answer()
                else:
                    await self._answer_once(context.semantic, exchange, body, asked)

    async def _answer_once(
        self, cache: SemanticCache, exchange: Exchange, body: bytes, asked: AskedOfServers
    ) -> None:
        """Answer what was nearly asked before, else let a server answer, and keep that."""
        context = self.context
        renamed = (asked.model or "") in context.backends.rules
        wanted = cache.asked(exchange, body, has_keys=context.has_keys, renamed=renamed)
        if wanted is not None and await cache.answer(exchange, wanted):
            return
        if wanted is None or not cache.may_collect(wanted):
            await Forwarding(context, exchange, body, asked).answer()
            return
        seen = None
        try:
            forwarding = Forwarding(context, exchange, body, asked, collected=cache.most_answer)
            await forwarding.answer()
            seen = forwarding.seen
        finally:
            cache.end(wanted, seen, exchange.status)

    async def _note(self, exchange: Exchange) -> None:
        """Take the announcement of a server. Raises ApiError."""
        if exchange.method != "POST":
            raise ApiError(
                405, f"{exchange.path}: only POST", code="method_not_allowed", headers=[(b"allow", b"POST")]
            )
        context = self.context
        body = await exchange.body(announcing.MOST_BODY, context.config.body_timeout)
        try:
            nonce = context.backends.announce(body, exchange.header(announcing.CODE.encode()))
        except PermissionError as error:
            raise ApiError(403, f"{exchange.path}: {error}", code="invalid_api_key") from None
        except LookupError as error:
            raise ApiError(409, f"{exchange.path}: {error}", code="conflict") from None
        except ValueError as error:
            raise ApiError(400, f"{exchange.path}: {error}", code="invalid_value") from None
        status = 401 if nonce is None else 200
        noted = announcing.Noted(nonce or context.backends.announced.nonce(time.monotonic()))
        await exchange.respond(status, msgspec.json.encode(noted))

    async def _answer_own(self, exchange: Exchange) -> None:
        if exchange.method not in {"GET", "HEAD"}:
            raise ApiError(
                405, f"{exchange.path}: only GET", code="method_not_allowed", headers=[(b"allow", b"GET")]
            )
        context = self.context
        now = time.monotonic()
        match exchange.path:
            case "/health" | "/ping":
                backends = context.backends
                spilled = bool(
                    exchange.header(SPILLED.encode())
                )  # a peer asks, which sends nothing on to others
                holds = backends.config.hold_seconds > 0
                able = not backends.draining and (holds or bool(backends.available(None, spilled=spilled)))
                states = {each.name: each.state(now) for each in backends.all}
                body = {
                    "status": "ready" if able else "no server is available", "backends": states,
                    "replicas_needed": round(backends.replicas_needed(now), 2),
                    "needed": {
                        name: round(needed, 2) for (name, _), needed in backends.needed_by_group(now).items() if name
                    },
                    "capacity": backends.capacity(), "backlog_seconds": round(backends.backlog_seconds(), 4),
                }  # fmt: skip
                await exchange.respond(200 if able else 503, msgspec.json.encode(body))
            case "/metrics":
                text = b"text/plain; version=0.0.4; charset=utf-8"
                await exchange.respond(200, context.metrics.render(), content_type=text)
            case "/v1/models":
                await exchange.respond(200, msgspec.json.encode({"object": "list", "data": self._models()}))
            case _:
                await exchange.respond(200, msgspec.json.encode({"data": self._backends(now)}))

    def _models(self) -> list[dict[str, Any]]:
        """The models of all servers that can be asked; one that several have is listed once."""
        now, found = time.monotonic(), dict[str, dict[str, Any]]()
        for backend in self.context.backends.all:
            if backend.is_available(now):
                for model in backend.models:
                    settled = self.context.backends.settled_version(model["id"])
                    if not settled or settled == backend.version(model["id"]):
                        found.setdefault(model["id"], model)
        for name in self.context.backends.rules.names:
            found.setdefault(name, {"id": name, "object": "model", "owned_by": "quire router"})
        return list(found.values())

    def _backends(self, now: float) -> list[dict[str, Any]]:
        backends = self.context.backends
        prefixes = backends.prefixes
        return [
            {
                "name": each.name, "state": each.state(now), "role": each.entry.role or "decode",
                "weight": each.weight, "requests": each.requests,
                "work": round(each.work), "pieces": prefixes.size(each.name), **_reports(backends, each),
                "answers": dict(each.answers),
                "models": [model["id"] for model in each.models],
                "versions": [each.version(model["id"]) for model in each.models],
                "round_trip_ms": round(1e3 * each.round_trip, 1),
            }
            for each in self.context.backends.all
        ]  # fmt: skip

    async def _fail(self, exchange: Exchange, error: Exception) -> None:
        """Answer an error in the form of the API that was called."""
        found = api_error(error)
        if found.status >= 500 and not isinstance(error, ApiError):
            log.error("request %s failed", exchange.request_id, exc_info=error)
        if exchange.status:  # the response has begun: it must not look complete
            if exchange.abort is not None:
                exchange.abort()
            return
        await exchange.refuse(found)
