"""The ASGI application: routing, access control, and how failures become responses."""

from __future__ import annotations

import asyncio

from quire.config.serving import ServingConfig
from quire.server import chat, completions, embeddings, scoring, status, tokens
from quire.server.access import AccessControl
from quire.server.batches import batch_routes
from quire.server.context import ServerContext
from quire.server.dialects import DIALECTS
from quire.server.errors import ApiError, ClientGoneError, api_error
from quire.server.exchange import Exchange, Receive, Scope, Send
from quire.server.logs import log, log_access
from quire.server.routes import Get, HttpRoute, Post
from quire.types import QuireError


async def _openapi(context: ServerContext, _: Exchange) -> bytes:
    from quire.server.openapi import document

    return document(open_routes(context.config))


ROUTES: tuple[HttpRoute, ...] = (
    *chat.ROUTES,
    *completions.ROUTES,
    *batch_routes.ROUTES,
    *embeddings.ROUTES,
    *scoring.ROUTES,
    *tokens.ROUTES,
    *status.ROUTES,
    *DIALECTS,
    Get(path="/openapi.json", summary="This document", tag="status", handler=_openapi, response=dict, api=""),
)


def open_routes(config: ServingConfig) -> tuple[HttpRoute, ...]:
    """The routes of the APIs that a server offers."""
    return tuple(route for route in ROUTES if not route.api or route.api in config.api)


class App:
    """The APIs of a server over an engine. Errors have the form of the API whose route was called, else OpenAI's, and
    reveal nothing internal.
    """

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self._access = AccessControl(context.config)
        context.has_keys = self._access.has_keys
        self._exact: dict[str, dict[str, HttpRoute]] = {}
        self._patterns: dict[tuple[str, str], dict[str, HttpRoute]] = {}
        for route in open_routes(context.config):
            before, hole, behind = route.path.partition("{}")
            if hole:
                self._patterns.setdefault((before, behind), {})[route.method] = route
            else:
                self._exact.setdefault(before, {})[route.method] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            await self._fail(exchange, error)
        finally:
            exchange.held.close()
            self.context.metrics.count_http(exchange)
            if self.context.tracer is not None:
                self.context.tracer.record(exchange)
            if self.context.config.access_log:
                log_access(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        methods = self._methods(exchange.path)
        if methods is not None:
            exchange.errors = next(iter(methods.values())).errors
        if not exchange.background:
            self._access.check_source(exchange)
            exchange.add_headers(self._access.cors_headers(exchange))
        if methods is None:
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
        if not route.open and not exchange.background:
            self._access.check_key(exchange)
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

    def _methods(self, path: str) -> dict[str, HttpRoute] | None:
        found = self._exact.get(path)
        if found is not None:
            return found
        matching = [
            (len(behind), methods)
            for (before, behind), methods in self._patterns.items()
            if path.startswith(before) and path.endswith(behind) and len(path) > len(before) + len(behind)
        ]
        return max(matching, key=lambda match: match[0])[1] if matching else None

    async def _fail(self, exchange: Exchange, failure: Exception) -> None:
        """Report a failure: as a response or, once a stream has started, as its last event."""
        error, form = api_error(failure), exchange.errors
        if not isinstance(failure, ApiError | QuireError):
            log.error("unexpected failure", exc_info=failure, extra={"details": {"id": exchange.request_id}})
        exchange.details["error"] = error.code
        try:
            async with asyncio.timeout(self.context.config.reader_timeout):
                if exchange.status:
                    await exchange.write(form.event(form.body(error)), more=False)
                    return
                headers = [*error.headers, (b"connection", b"close")] if error.close else error.headers
                await exchange.respond(error.status, form.body(error), headers=headers)
        except TimeoutError:
            if exchange.abort is not None:
                exchange.abort()
