"""The ASGI application of a server with several models: passes each request to the APIs of the model that it names."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, cast

import msgspec

from quire.config.serving import ServingConfig
from quire.engine.api import Engine, EngineState, require_ready
from quire.records import dataclass
from quire.server.access import AccessControl
from quire.server.admin import AdminAccess, closed_routes
from quire.server.app import open_routes
from quire.server.errors import ApiError, ClientGoneError
from quire.server.exchange import Exchange, Receive, Scope, Send
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.fleet_routes import fleet_routes
from quire.server.fleet.member import Member
from quire.server.fleet.shares import BODIES
from quire.server.logs import log_access
from quire.server.query import query_of
from quire.server.request_memory import RequestMemory
from quire.server.routes import RouteTable

_BODIES_PART = 16 / 3  # a RequestMemory has three sixteenths for bodies
_PACKED = "msgpack"
_WRITES = frozenset(("POST", "PUT", "PATCH", "DELETE"))


class _Named(msgspec.Struct):
    """What of a body says which model is asked; other dialects call it name."""

    model: str | None = None
    name: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class _Bodies:
    """What the bodies of requests may hold before a model has them: the part of an engine that RequestMemory reads."""

    request_memory: int


class FleetApp:
    """Checks who asks, reads which model is asked, waits until it is loaded, and passes the request on unchanged."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._config = fleet, fleet.config
        bodies = cast(Engine, _Bodies(int(fleet.shares.server[BODIES] * _BODIES_PART)))
        self.memory = RequestMemory(bodies, fleet.config.max_num_queued_reqs)
        self._access, self._admin = AccessControl(fleet.config), AdminAccess(fleet.config)
        own = fleet_routes(fleet)
        closed = closed_routes(own, fleet.config)
        self._own = RouteTable(
            route for route in own if route not in closed and route.belongs(fleet.config.api)
        )
        self._routes = RouteTable(open_routes(fleet.config))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._pass_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self.memory)
        app = self._fleet.default.service.app
        try:
            found = await self._answer_own(exchange)
            chosen = None if found else await self._choose(exchange)
        except ClientGoneError as gone:
            exchange.details["ended"], chosen = gone.reason, None
        except asyncio.CancelledError:
            exchange.held.close()
            raise
        except Exception as error:
            chosen = None
            await app.fail(exchange, error)
        if chosen is None:
            exchange.held.close()
            app.context.metrics.count_http(exchange)
            if self._config.access_log:
                log_access(exchange)
            return
        member, body = chosen
        with member.serving():
            await member.service.app(scope, _again(body, receive), send)

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
        if route.admin:
            self._admin.admin_only(exchange)
        elif not route.open:
            self._access.check_key(exchange)
        await route.answer(self._fleet.default.service.context, exchange)
        return True

    async def _choose(self, exchange: Exchange) -> tuple[Member, bytes | None]:
        """The model for a request, and its body if it was read. Raises ApiError, in the form of the request's API."""
        methods = self._routes.find(exchange.path)
        route = None if methods is None else methods.get(exchange.method)
        if route is None or exchange.method not in _WRITES or route.open:
            return self._any(exchange), None
        exchange.errors, exchange.handler = route.errors, route.path
        if not exchange.inner:
            self._access.check_source(exchange)
            if route.admin:
                self._admin.admin_only(exchange)
            else:
                self._access.check_key(exchange)
        require_ready(self._fleet.state)
        body = await exchange.body(self._config.max_body_bytes, self._config.body_timeout)
        named = _named(exchange, body)
        name = named.model or named.name or _of_query(exchange)
        member = self._fleet.default
        if name is not None:
            key = exchange.header(b"x-session-id") or named.user or ""
            member = self._fleet.members[self._fleet.route(name, key).target]
        if not route.admin:  # those for administrators also concern models that sleep
            await member.ready(self._config.max_load_wait, self._config.max_num_queued_reqs)
        return member, body

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
            await member.ready(self._config.max_load_wait, self._config.max_num_queued_reqs)
        except ApiError:
            pass  # the API of the socket refuses it in its own form
        with member.serving():
            await member.service.app(scope, receive, send)


def _of_query(exchange: Exchange) -> str | None:
    return query_of(exchange.scope.get("query_string", b"")).get("model")


def _named(exchange: Exchange, body: bytes) -> _Named:
    """What a body says about its model; nothing for one that is wrong, which the model's API refuses."""
    kind = exchange.header(b"content-type")
    try:
        if _PACKED in kind:
            return msgspec.msgpack.decode(body, type=_Named)
        return msgspec.json.decode(body, type=_Named) if "json" in kind else _Named()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Named()


def _again(body: bytes | None, receive: Receive) -> Receive:
    """The messages of a request whose body was read already."""
    pending = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await receive()

    return first


def check_serving(config: ServingConfig) -> None:
    """Raise ValueError for keys that cannot be read."""
    AccessControl(config)
    AdminAccess(config)
