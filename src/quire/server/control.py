"""vLLM's routes about the server itself: its load, and for administrators its options, cache and profiles."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from quire import __version__
from quire.server.context import ServerContext
from quire.server.errors import ApiError, retry_headers
from quire.server.exchange import Exchange
from quire.server.routes import Act, Get, HttpRoute

_KEYS = ("api_key", "admin_api_key")
_CLEAR_SECONDS = 10.0


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
    return {
        "vllm_config": {"model": card.name, "max_num_seqs": card.max_num_seqs, **options},
        **options,
        "model_path": card.name,
        "max_running_requests": card.max_num_seqs,
        "version": __version__,
        "internal_states": [asdict(context.engine.stats)],
    }


async def reset_prefix_cache(context: ServerContext, exchange: Exchange) -> None:
    """Forget the cached prefixes that no running sequence holds. Raises ApiError 503 when the engine is silent."""
    context.card()
    if not await context.engine.clear_prefix_cache(_CLEAR_SECONDS):
        message = f"the engine has not answered within {_CLEAR_SECONDS:g} s"
        raise ApiError(503, message, code="not_reset", headers=retry_headers(1.0))
    await exchange.respond(200, b"")


async def start_profile(context: ServerContext, exchange: Exchange) -> None:
    """Begin a profile of the engine's steps."""
    context.card()
    await context.profile.start()
    await exchange.respond(200, b"")


async def stop_profile(context: ServerContext, exchange: Exchange) -> None:
    """End the profile, and write it to a file."""
    await context.profile.stop()
    await exchange.respond(200, b"")


ROUTES: tuple[HttpRoute, ...] = (
    Get(path="/load", summary="How many sequences run or wait", tag="status", handler=load, response=LoadBody),
    Get(
        path="/server_info", summary="The model, and the options of the server", tag="admin", handler=server_info,
        response=dict, admin=True,
    ),
    *(
        Act(verb="POST", path=path, summary=summary, tag="admin", handler=handler, response=str, admin=True)
        for path, summary, handler in (
            ("/reset_prefix_cache", "Forget cached prefixes", reset_prefix_cache),
            ("/start_profile", "Begin a profile of the engine's steps", start_profile),
            ("/stop_profile", "End the profile, and write it to a file", stop_profile),
        )
    ),
)  # fmt: skip
