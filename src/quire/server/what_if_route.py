"""POST /admin/whatif: the latest load of a model under other settings, for administrators."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.objectives import OBJECTIVES
from quire.server.context import ServerContext
from quire.server.errors import ApiError, bad_request
from quire.server.exchange import Body, Exchange
from quire.server.routes import HttpRoute, Post

_SETTINGS, _SEEDS = 16, 10


class WhatIfRequest(msgspec.Struct, kw_only=True):
    """Settings by the names of the server's options, as in `quire whatif`: max_num_seqs, rate, replicas, … With `like`
    the requests meet another model of this server, as its log has it. `last` keeps the requests of so many seconds,
    `goodput` has objectives in milliseconds, `seeds` counts simulations of each.
    """

    set: Annotated[dict[str, int | float | str | bool], Meta(max_length=_SETTINGS)] = {}
    like: str | None = None
    last: Annotated[float, Meta(gt=0)] | None = None
    goodput: dict[str, Annotated[float, Meta(gt=0)]] | None = None
    seeds: Annotated[int, Meta(ge=1, le=_SEEDS)] = 3


class WhatIfBody(msgspec.Struct, kw_only=True):
    """Figures of the load of this server as measured, as simulated, and as they would be, with error bars; the share of
    steps beyond what the fit of step times has seen."""

    set: dict[str, str]
    requests: int
    hours: float
    figures: dict[str, Any]
    outside_fit: float
    fit: dict[str, Any]
    preemptions: list[int]
    refused: list[int]
    left_out: list[int]


async def ask_what_if(context: ServerContext, _: Exchange, body: Body[WhatIfRequest]) -> WhatIfBody:
    """Simulate the latest load as it was and as it would be. Raises ApiError 400, 404, 409 and 504."""
    simulations, asked = context.simulations, body.value
    if not simulations.on:
        raise ApiError(404, "/admin/whatif is off; a server with --simulator-memory has it", code="not_found")
    context.card()
    for name in asked.goodput or ():
        if name not in OBJECTIVES:
            raise bad_request("goodput", f"goodput: {name!r} is not one of {', '.join(OBJECTIVES)}")
    if not asked.set and asked.like is None:
        raise bad_request("set", "set: settings, or a model in like, are needed")
    other = None if asked.like is None else simulations.engines().get(asked.like)
    if asked.like is not None and other is None:
        raise bad_request("like", f"like: this server has no model {asked.like!r} beside others")
    settings = {name: _text(value) for name, value in asked.set.items()}
    question = {
        "set": settings,
        "last": math.inf if asked.last is None else asked.last,
        "slo": [f"{name}:{bound}" for name, bound in (asked.goodput or {}).items()],
        "seeds": asked.seeds,
    }
    answer = await simulations.what_if(context.engine, question, other)
    answer.pop("seconds")
    return WhatIfBody(set=settings, **answer)


def _text(value: float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


ROUTES: tuple[HttpRoute, ...] = (
    Post(
        path="/admin/whatif", summary="The latest load under other settings", tag="admin", handler=ask_what_if,
        request=WhatIfRequest, response=WhatIfBody, admin=True, api="",
        further={409: "another what-if runs", 504: "it takes too long"},
    ),
)  # fmt: skip
