"""vLLM's routes about the server itself: its load, and for administrators its options, cache and profiles."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from quire import __version__
from quire.engine.api import EngineState
from quire.server.context import ServerContext
from quire.server.errors import ApiError, bad_request, retry_headers, shorten
from quire.server.exchange import Exchange
from quire.server.query import query_of
from quire.server.routes import NOTHING, PLAIN, Act, Get, HttpRoute

_KEYS = ("api_key", "admin_api_key")
_BY_ACCOUNT = ("usage", "tenant_blocks")  # an account may be the digest of a key
_CLEAR_SECONDS = 10.0


class SleepBody(msgspec.Struct):
    """Whether the model sleeps."""

    is_sleeping: bool


class LoadBody(msgspec.Struct):
    """How many sequences run or wait."""

    server_load: int


async def load(context: ServerContext, _: Exchange) -> LoadBody:
    """How many sequences run or wait."""
    stats = context.engine.stats
    return LoadBody(stats.running + stats.waiting)


async def server_info(context: ServerContext, _: Exchange) -> dict[str, Any]:
    """The model, the options of the server without its keys, and the state of its engine; for vLLM and SGLang."""
    card = context.card()
    options = {name: given for name, given in asdict(context.config).items() if name not in _KEYS}
    options["max_model_len"] = card.max_model_len
    state = asdict(context.engine.stats)
    for name in _BY_ACCOUNT:
        del state[name]
    return {
        "vllm_config": {"model": card.name, "max_num_seqs": card.max_num_seqs, **options},
        **options,
        "model_path": card.name,
        "max_running_requests": card.max_num_seqs,
        "version": __version__,
        "internal_states": [state],
    }


async def reset_prefix_cache(context: ServerContext, _: Exchange) -> bytes:
    """Forget the cached prefixes that no running sequence holds. Raises ApiError 503 when the engine is silent."""
    context.card()
    if not await context.engine.clear_prefix_cache(_CLEAR_SECONDS):
        message = f"the engine has not answered within {_CLEAR_SECONDS:g} s"
        raise ApiError(503, message, code="not_reset", headers=retry_headers(1.0))
    return NOTHING


async def start_profile(context: ServerContext, _: Exchange) -> bytes:
    """Begin a profile of the engine's steps."""
    context.card()
    await context.profile.start()
    return NOTHING


async def stop_profile(context: ServerContext, _: Exchange) -> bytes:
    """End the profile, and write it to a file."""
    await context.profile.stop()
    return NOTHING


def asked_sleep(exchange: Exchange, seconds: float, *known: str) -> tuple[int, float]:
    """The level of a sleep, and how long requests may go on: `seconds` if they are waited for. Raises ApiError 400."""
    given = query_of(exchange.scope["query_string"], ("level", "mode", *known))
    level, mode = given.get("level", "1"), given.get("mode", "abort")
    if level not in {"1", "2"}:
        raise bad_request(
            "level", f"level: {shorten(level, 20)!r} is not 1 (give pages back) or 2 (end the process)"
        )
    if mode not in {"abort", "wait"}:
        raise bad_request("mode", f"mode: {shorten(mode, 20)!r} is not abort or wait")
    return int(level), seconds if mode == "wait" else 0.0


async def sleep(context: ServerContext, exchange: Exchange) -> bytes:
    """Put the model to sleep, with vLLM's parameters."""
    await context.engine.sleep(*asked_sleep(exchange, context.config.shutdown_timeout))
    return NOTHING


async def wake_up(context: ServerContext, _: Exchange) -> bytes:
    """Wake the model up."""
    await context.engine.wake()
    return NOTHING


async def is_sleeping(context: ServerContext, _: Exchange) -> SleepBody:
    """Whether the model sleeps."""
    return SleepBody(context.engine.state is EngineState.SLEEPING)


ROUTES: tuple[HttpRoute, ...] = (
    Get(path="/load", summary="How many sequences run or wait", tag="status", handler=load, response=LoadBody),
    Get(
        path="/server_info", summary="The model, and the options of the server", tag="admin", handler=server_info,
        response=dict, admin=True,
    ),
    Get(
        path="/is_sleeping", summary="Whether the model sleeps", tag="admin", handler=is_sleeping, response=SleepBody,
        admin=True,
    ),
    Act(
        verb="POST", path="/sleep", summary="Put the model to sleep", tag="admin", handler=sleep, response=str,
        media=PLAIN, admin=True, query=("level", "mode"),
    ),
    *(
        Act(
            verb="POST", path=path, summary=summary, tag="admin", handler=handler, response=str, media=PLAIN,
            admin=True,
        )
        for path, summary, handler in (
            ("/reset_prefix_cache", "Forget cached prefixes", reset_prefix_cache),
            ("/wake_up", "Wake the model up", wake_up),
            ("/start_profile", "Begin a profile of the engine's steps", start_profile),
            ("/stop_profile", "End the profile, and write it to a file", stop_profile),
        )
    ),
)  # fmt: skip
