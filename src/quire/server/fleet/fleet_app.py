"""The ASGI application of a server with several models: passes each request to the APIs of the model that it names."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from quire.engine.api import EngineState, require_ready
from quire.server.access import AccessControl
from quire.server.admin import AdminAccess, closed_routes
from quire.server.app import open_routes
from quire.server.batches import batch_routes
from quire.server.context import ServerContext
from quire.server.dialects.keep_alive import HEEDED, keep_seconds
from quire.server.errors import ApiError, ClientGoneError
from quire.server.exchange import Exchange, Receive, Scope, Send
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.fleet_routes import fleet_routes
from quire.server.fleet.member import Member
from quire.server.fleet.passing import Passing
from quire.server.fleet.shares import BODIES
from quire.server.inner_request import ask_inner
from quire.server.logs import log_access
from quire.server.query import query_of
from quire.server.request_memory import memory_of_bodies
from quire.server.request_routes import request_routes
from quire.server.routes import Get, HttpRoute, Post, RouteTable
from quire.types import QuireError

_PACKED = "msgpack"
_WRITES = frozenset(("POST", "PUT", "PATCH", "DELETE"))


class _Named(msgspec.Struct):
    """What of a body says which model is asked; other dialects call it name."""

    model: str | None = None
    name: str | None = None
    user: str | None = None
    session_id: str | None = None
    keep_alive: str | float | None = None


class FleetApp:
    """Checks who asks, reads which model is asked, waits until it is loaded, and passes the request on unchanged."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._config = fleet, fleet.config
        self.memory = memory_of_bodies(fleet.shares.server[BODIES], fleet.config.max_num_queued_reqs)
        self._access = AccessControl(fleet.config, fleet.tenants)
        self._admin = AdminAccess(fleet.config, fleet.tenants)
        self.context: ServerContext | None = None  # of the routes that concern no single model
        loaded = request_routes(
            lambda _: [each.service.context for each in fleet.members.values() if each.engine.requests()]
        )
        own = (*fleet_routes(fleet), *batch_routes.ROUTES, *loaded)
        closed = closed_routes(own, fleet.config)
        own = tuple(route for route in own if route not in closed and route.belongs(fleet.config.api))
        passed = open_routes(fleet.config)
        self._own = RouteTable((*own, _openapi_route(own, passed)))
        self._routes = RouteTable(passed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._pass_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self.memory)
        app = self._fleet.default.service.app
        try:
            own = await self._answer_own(exchange)
            if not own and await self._pass(exchange, receive, send):
                return
        except ClientGoneError as gone:
            exchange.details["ended"] = gone.reason
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await app.fail(exchange, error)
        else:
            if not own:
                member = self._any(exchange)
                with member.serving():
                    await member.service.app(scope, receive, send)
                return
        finally:
            exchange.held.close()
        app.context.metrics.count_http(exchange)
        if self._config.access_log:
            log_access(exchange)

    async def _answer_own(self, exchange: Exchange) -> bool:
        """Answer what concerns all models; false for a path of a model's."""
        methods = self._own.find(exchange.path)
        route = (
            None if methods is None else methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        )
        if route is None:
            return False
        exchange.errors, exchange.handler = route.errors, route.path
        self._access.check_source(exchange)
        exchange.add_headers(self._access.cors_headers(exchange))
        self._admin.check_route(self._access, exchange, route)
        assert self.context is not None
        await route.answer(self.context, exchange)
        return True

    async def _pass(self, exchange: Exchange, receive: Receive, send: Send) -> bool:
        """Pass a request on to the model that it names; false for one that has no body to name a model.

        Raises ApiError, to be answered in the form of the request's API.
        """
        methods = self._routes.find(exchange.path)
        route = None if methods is None else methods.get(exchange.method)
        if route is None or exchange.method not in _WRITES or route.open:
            return False
        exchange.errors, exchange.handler = route.errors, route.path
        if not exchange.inner:
            self._access.check_source(exchange)
            self._admin.check_route(self._access, exchange, route)
        if isinstance(route, Post) and not route.admin:
            await self._fleet.tenants.enter(exchange)
        require_ready(self._fleet.state)
        body = await exchange.body(self._config.max_body_bytes, self._config.body_timeout)
        named = _named(exchange, body)
        if route.api == "ollama" and named.keep_alive is not None and self._heeds(exchange):
            exchange.scope[HEEDED] = keep_seconds(named.keep_alive)
        found = await self._fleet.settled_route(*_asked(exchange, named))
        passing = Passing(self._fleet, found, exchange.scope, body, receive)
        await passing.answer(send, administrative=route.admin)
        shadow = self._fleet.members.get(found.shadow or "")  # unless it has gone
        if passing.seen is not None and shadow is not None and not route.admin:
            ask = partial(_ask_shadow, shadow, exchange.path, body, exchange.tenant)
            self._fleet.shadows.compare((found.target, shadow.id), ask, exchange.request_id, passing.seen)
        return True

    def _heeds(self, exchange: Exchange) -> bool:
        return self._config.allow_keep_alive or (not exchange.inner and self._admin.is_presented(exchange))

    def _any(self, exchange: Exchange) -> Member:
        """A model for a path that needs none in particular: the one that is named, or one that is loaded."""
        try:
            name = _of_query(exchange)
            if name is not None and name in self._fleet.rules:
                return self._fleet.members[self._fleet.route(name, "").target]
        except ApiError:
            pass
        members = self._fleet.default, *self._fleet.members.values()
        return next((each for each in members if each.engine.state is EngineState.READY), members[0])

    async def _pass_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A conversation belongs to the model that its address names; it stays there."""
        member = self._fleet.default
        try:
            name = query_of(scope["query_string"]).get("model")
            if name is not None:
                member = self._fleet.members[self._fleet.route(name, "").target]
            await self._fleet.ready(member)
        except (ApiError, QuireError):
            pass  # the API of the socket refuses it in its own form
        with member.serving():
            await member.service.app(scope, receive, send)


async def _ask_shadow(shadow: Member, path: str, body: bytes, tenant: str) -> tuple[int, bytes]:
    with shadow.serving():
        answer = await ask_inner(shadow.service.app, shadow.service.memory, path, body, tenant)
    return answer.status, answer.body


def _openapi_route(own: tuple[HttpRoute, ...], passed: tuple[HttpRoute, ...]) -> HttpRoute:
    """The description of the routes of all models, and of those of each that they do not replace."""
    taken = {(route.method, route.path) for route in own}
    shown = (*own, *(route for route in passed if (route.method, route.path) not in taken))

    async def openapi(_: ServerContext, __: Exchange) -> bytes:
        from quire.server.openapi import document

        return document(shown)

    return Get(
        path="/openapi.json", summary="This document", tag="status", handler=openapi, response=dict, api=""
    )


def _of_query(exchange: Exchange) -> str | None:
    return query_of(exchange.scope.get("query_string", b"")).get("model")


def _asked(exchange: Exchange, named: _Named) -> tuple[str | None, str]:
    """The model that a request names, and the key by which its choice among versions stays the same."""
    return named.model or named.name or _of_query(exchange), exchange.header(
        b"x-session-id"
    ) or named.session_id or named.user or ""


def _named(exchange: Exchange, body: bytes) -> _Named:
    """What a body says about its model; nothing for one that is wrong, which the model's API refuses."""
    kind = exchange.header(b"content-type")
    try:
        if _PACKED in kind:
            return msgspec.msgpack.decode(body, type=_Named)
        return msgspec.json.decode(body, type=_Named) if "json" in kind else _Named()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Named()
