"""The route by which a router follows the KV cache of a server: a snapshot, then every change."""

from __future__ import annotations

from quire.engine.cache_log import TooManyFollowersError
from quire.server.answering import EVENTS
from quire.server.context import ServerContext
from quire.server.errors import ApiError, retry_headers
from quire.server.exchange import Exchange
from quire.server.query import replica_of
from quire.server.routes import NOTHING, Act, HttpRoute

_PAUSE = 5.0  # seconds without an event after which the number of the last batch is sent


async def follow_cache(context: ServerContext, exchange: Exchange) -> bytes | None:
    """Send what is cached, and what changes. Raises ApiError where that is off, and for one follower too many."""
    logs = context.engine.cache_logs()
    if not logs:
        raise ApiError(
            404, f"{exchange.path} is off; a server with --kv-events-config has it", code="not_found"
        )
    log = logs[replica_of(exchange.scope["query_string"], len(logs))]
    if exchange.holds_back:
        raise ApiError(400, "events have no end, which HTTP/1.0 cannot say", code="bad_request")
    if exchange.method == "HEAD":
        return NOTHING
    log.named = context.owners.exchange_of
    try:
        follower = log.follow()
    except TooManyFollowersError as error:
        raise ApiError(503, str(error), code="too_many_followers", headers=retry_headers(10.0)) from None
    try:
        async with exchange.watch() as watch:
            with context.watched(watch):
                headers = [(b"content-type", EVENTS), (b"cache-control", b"no-store")]
                await exchange.start(200, [*headers, (b"x-quire-replicas", b"%d" % len(logs))])
                async for part in follower.events(_PAUSE):
                    await exchange.write(part)
        await exchange.write(b"", more=False)
    finally:
        log.leave(follower)
    return None


ROUTES: tuple[HttpRoute, ...] = (
    Act(
        verb="GET", path="/kv/events", summary="Follow which KV blocks are cached", tag="admin", handler=follow_cache,
        response=str, media=EVENTS, admin=True, query=("replica",),
    ),
)  # fmt: skip
