"""The ASGI application: routing, access control, and how failures become responses."""

from __future__ import annotations

import asyncio

from quire.server import chat, completions, embeddings, scoring, status, tokens
from quire.server.access import AccessControl
from quire.server.chunks import error_event
from quire.server.context import ServerContext
from quire.server.errors import ApiError, ClientGoneError, api_error
from quire.server.exchange import Exchange, Receive, Scope, Send
from quire.server.logs import log, log_access
from quire.server.routes import Get, HttpRoute
from quire.types import QuireError


async def _openapi(_: ServerContext, _exchange: Exchange) -> bytes:
    from quire.server.openapi import document

    return document(ROUTES)


ROUTES: tuple[HttpRoute, ...] = (
    *chat.ROUTES,
    *completions.ROUTES,
    *embeddings.ROUTES,
    *scoring.ROUTES,
    *tokens.ROUTES,
    *status.ROUTES,
    Get(path="/openapi.json", summary="This document", tag="status", handler=_openapi, response=dict),
)


class App:
    """OpenAI's API over an engine. Errors have one shape on every route and reveal nothing internal."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self._access = AccessControl(context.config)
        context.has_keys = self._access.has_keys
        self._exact: dict[str, dict[str, HttpRoute]] = {}
        self._prefixes: dict[str, dict[str, HttpRoute]] = {}
        for route in ROUTES:
            table = self._prefixes if route.path.endswith("{}") else self._exact
            table.setdefault(route.path.removesuffix("{}"), {})[route.method] = route

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
        self._access.check_source(exchange)
        exchange.add_headers(self._access.cors_headers(exchange))
        methods = self._methods(exchange.path)
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
        if not route.open:
            self._access.check_key(exchange)
        if route.method == "POST" and exchange.header(b"idempotency-key"):
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
        for prefix, methods in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods
        return None

    async def _fail(self, exchange: Exchange, failure: Exception) -> None:
        """Report a failure: as a response or, once a stream has started, as its last event."""
        error = api_error(failure)
        if not isinstance(failure, ApiError | QuireError):
            log.error("unexpected failure", exc_info=failure, extra={"details": {"id": exchange.request_id}})
        exchange.details["error"] = error.code
        try:
            async with asyncio.timeout(self.context.config.reader_timeout):
                if exchange.status:
                    await exchange.write(error_event(error.body()), more=False)
                    return
                headers = [*error.headers, (b"connection", b"close")] if error.close else error.headers
                await exchange.respond(error.status, error.body(), headers=headers)
        except TimeoutError:
            if exchange.abort is not None:
                exchange.abort()
