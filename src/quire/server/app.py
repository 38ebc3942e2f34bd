"""The ASGI application: routing, access control, and how failures become responses."""

from __future__ import annotations

import asyncio

from quire.config.serving import ServingConfig
from quire.server import (
    adapter_routes,
    cache_events,
    chat,
    completions,
    control,
    embeddings,
    explaining,
    live_control,
    overview,
    request_routes,
    scoring,
    status,
    tokens,
    what_if_route,
)
from quire.server.access import AccessControl
from quire.server.admin import AdminAccess, closed_routes
from quire.server.batches import batch_routes
from quire.server.context import ServerContext
from quire.server.dialects import DIALECTS
from quire.server.dialects.generate_route import shared
from quire.server.errors import ApiError, ClientGoneError, api_error
from quire.server.exchange import Exchange, Receive, Scope, Send
from quire.server.log_marks import tell_marks
from quire.server.logs import log, log_access
from quire.server.pages import learn_routes, page_routes
from quire.server.realtime.websocket import PATH as REALTIME_PATH
from quire.server.routes import Act, Get, HttpRoute, Post, RouteTable
from quire.types import QuireError


async def _openapi(context: ServerContext, _: Exchange) -> bytes:
    from quire.server.openapi import document

    return document(open_routes(context.config))


async def _realtime(_: ServerContext, __: Exchange) -> None:
    message = "this path is for WebSockets; the server needs the package websockets: pip install 'quire-llm[websocket]'"
    raise ApiError(426, message, code="upgrade_required", headers=[(b"upgrade", b"websocket")])


PAGES = (*page_routes.ROUTES, *learn_routes.ROUTES)
ROUTES: tuple[HttpRoute, ...] = (
    *chat.ROUTES,
    *completions.ROUTES,
    *batch_routes.ROUTES,
    *embeddings.ROUTES,
    *scoring.ROUTES,
    *tokens.ROUTES,
    *status.ROUTES,
    *control.ROUTES,
    *explaining.ROUTES,
    *live_control.ROUTES,
    *cache_events.ROUTES,
    *what_if_route.ROUTES,
    *overview.ROUTES,
    *request_routes.ROUTES,
    *adapter_routes.ROUTES,
    *DIALECTS,
    *PAGES,
    Act(
        verb="GET", path=REALTIME_PATH.decode(), summary="A conversation over a WebSocket", tag="generation",
        handler=_realtime, response=dict, further={426: "the request does not open a WebSocket"},
    ),
    Get(path="/openapi.json", summary="This document", tag="status", handler=_openapi, response=dict, api=""),
)  # fmt: skip


def open_routes(config: ServingConfig) -> tuple[HttpRoute, ...]:
    """The routes of the APIs that a server offers, without those for administrators when it has none."""
    closed = closed_routes(ROUTES, config)
    without = {*closed, *(() if config.ui else PAGES)}
    return shared(tuple(route for route in ROUTES if route.belongs(config.api) and route not in without))


class App:
    """The APIs of a server over an engine. Errors have the form of the API whose route was called, else OpenAI's, and
    reveal nothing internal.
    """

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self._access = AccessControl(context.config, context.tenants)
        self._admin = AdminAccess(context.config, context.tenants)
        context.has_keys = self._access.has_keys
        self._routes = RouteTable(open_routes(context.config))
        self._closed = RouteTable(closed_routes(ROUTES, context.config))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self.context.memory)
        try:
            await self._answer(exchange)
        except ClientGoneError as gone:
            exchange.details["ended"] = gone.reason
        except asyncio.CancelledError:  # the server is shutting down
            raise
        except Exception as error:
            await self.fail(exchange, error)
        finally:
            exchange.held.close()
            if exchange.asked:
                tell_marks(self.context.engine, exchange)
            self.context.metrics.count_http(exchange)
            if self.context.tracer is not None:
                self.context.tracer.record(exchange, self.context.profile)
            if self.context.config.access_log:
                log_access(exchange)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        from quire.server.realtime.realtime_session import serve_socket  # with the first socket

        try:
            await serve_socket(self.context, self._access, self, scope, receive, send)
        except OSError:  # uvicorn's error for a client that has left
            raise
        except Exception as error:
            log.error("unexpected failure of a socket", exc_info=error)

    async def _answer(self, exchange: Exchange) -> None:
        methods = self._routes.find(exchange.path)
        closed = self._closed.find(exchange.path) if methods is None else None
        if known := methods or closed:
            exchange.errors = next(iter(known.values())).errors
        if not exchange.inner:
            self._access.check_source(exchange)
            exchange.add_headers(self._access.cors_headers(exchange))
        if methods is None:
            if closed is not None:
                self._admin.admin_only(exchange)
            raise ApiError(404, "no such path; see /openapi.json", code="not_found")
        exchange.handler = next(iter(methods.values())).path
        allowed = sorted({*methods, "OPTIONS", *(("HEAD",) if "GET" in methods else ())})
        allow = (b"allow", ", ".join(allowed).encode())
        if exchange.method == "OPTIONS":
            await exchange.respond(
                200, b"", headers=[allow, *self._access.preflight_headers(exchange, allowed)]
            )
            return
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if route is None:
            message = f"{exchange.method} is not allowed on this path; use {allow[1].decode()}"
            raise ApiError(405, message, code="method_not_allowed", headers=[allow])
        self._admin.check_route(self._access, exchange, route)
        if isinstance(route, Post) and not (route.admin or route.open):
            await self.context.tenants.enter(exchange)
        if isinstance(route, Post) and exchange.header(b"idempotency-key"):
            await self._answer_once(route, exchange)
        else:
            await route.answer(self.context, exchange)

    async def _answer_once(self, route: HttpRoute, exchange: Exchange) -> None:
        """Answer a request that has an Idempotency-Key."""
        config, replays = self.context.config, self.context.replays
        self.context.card()
        body = await exchange.body(config.max_body_bytes, config.body_timeout)
        answer = replays.find(exchange, body)
        if answer is not None:
            await replays.repeat(exchange, answer)
            return
        complete = False
        try:
            await route.answer(self.context, exchange)
            complete = True
        finally:
            replays.finish(exchange, complete=complete)
            exchange.recorded = None

    async def fail(self, exchange: Exchange, failure: Exception) -> None:
        """Report a failure: as a response or, once a stream has started, as its last event."""
        error = api_error(failure)
        if not isinstance(failure, ApiError | QuireError):
            log.error("unexpected failure", exc_info=failure, extra={"details": {"id": exchange.request_id}})
        exchange.details["error"] = error.code
        try:
            async with asyncio.timeout(self.context.config.reader_timeout):
                if exchange.status:
                    form = exchange.errors
                    await exchange.write(form.event(form.body(error)), more=False)
                    return
                await exchange.refuse(error)
        except TimeoutError:
            if exchange.abort is not None:
                exchange.abort()
