"""GET /v1/overview: what the engine does now, once or every second as a stream of events, for the control room.

A client sees its own requests. What the engine holds of all requests is for administrators, and for everybody where
there is no more than one key.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence

import msgspec

from quire.engine.api import EngineState
from quire.server.answering import EVENTS
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Exchange
from quire.server.query import query_of
from quire.server.request_routes import RequestBody, requests_of
from quire.server.routes import Act, HttpRoute
from quire.server.watched_engine import SECONDS, EngineDetail, EngineOverview, FinishedRequest

_SLOWEST = 12
_REQUESTS = 200
_ENDING = {EngineState.DRAINING, EngineState.FAILED}


class OverviewBody(msgspec.Struct):
    """What the engine does, what it holds, and the requests of the client: those in progress, and the slowest of the
    latest ones that have ended."""

    overview: EngineOverview
    detail: EngineDetail | None
    requests: list[RequestBody]
    slowest: list[FinishedRequest]


class _Own(msgspec.Struct):
    requests: Sequence[RequestBody]
    slowest: Sequence[FinishedRequest]


_encode = msgspec.json.Encoder().encode


async def _overview(context: ServerContext, exchange: Exchange) -> None:
    given = query_of(exchange.scope["query_string"], ("stream", "model"))
    stream = given.get("stream", "false").lower()
    if stream not in {"true", "false", "1", "0"}:
        raise bad_request("stream", "stream: must be true or false")
    if stream in {"false", "0"} or exchange.holds_back:
        await exchange.respond(200, await _body(context, exchange))
        return
    first = await _body(context, exchange)
    async with exchange.watch() as watch:
        with context.watched(watch):
            headers = [
                (b"content-type", EVENTS),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await exchange.start(200, headers)
            await exchange.write(b"data: " + first + b"\n\n")
            loop = asyncio.get_running_loop()
            while context.engine.state not in _ENDING:
                # All who watch wake together, and the first one looks for all.
                await asyncio.sleep(SECONDS - loop.time() % SECONDS)
                if not exchange.blocked():
                    await exchange.write(b"data: " + await _body(context, exchange) + b"\n\n")
            await exchange.write(b"data: [DONE]\n\n", more=False)


async def _body(context: ServerContext, exchange: Exchange) -> bytes:
    watched = context.watched_engine
    looked = await watched.look()
    account = None if exchange.administrator else exchange.tenant
    own = watched.own.get(account)
    if own is None or own[0] != looked:
        seen = _Own(requests_of([context], exchange)[:_REQUESTS], _slowest(context, exchange))
        sees_all = exchange.administrator or not exchange.tenant
        detail = watched.detail if sees_all else b"null"
        body = b'{"overview":%b,"detail":%b,%b' % (watched.overview, detail, _encode(seen)[1:])
        own = watched.own[account] = looked, body
    return own[1]


def _slowest(context: ServerContext, exchange: Exchange) -> list[FinishedRequest]:
    ended = context.watched_engine.finished.values()
    mine = (one for one in ended if context.owners.find(one.id, exchange))
    return heapq.nlargest(_SLOWEST, mine, key=lambda one: one.ms)


ROUTES: tuple[HttpRoute, ...] = (
    Act(
        verb="GET", path="/v1/overview", summary="What the engine does now; with stream=true, every second",
        tag="status", handler=_overview, response=OverviewBody, query=("stream",), either=True, api="",
    ),
)  # fmt: skip
