"""The requests in progress: each client sees and ends its own, an administrator all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from quire.core.policy import BACKGROUND
from quire.outputs import RequestOutput
from quire.server.context import ServerContext
from quire.server.errors import ApiError, shorten
from quire.server.exchange import Exchange
from quire.server.routes import Act, Get, HttpRoute
from quire.types import Request

_PATH = "/v1/requests/"
_TENANT_CHARS = 12
Contexts = Callable[[ServerContext], Sequence[ServerContext]]


class RequestBody(msgspec.Struct, kw_only=True):
    """A request in progress. Times are seconds; `ttft` is null before the first token. `tenant` names the API key, for
    administrators: the beginning of its hash."""

    id: str
    object: str = "request"
    model: str
    status: str
    service_class: str | None
    priority: int
    samples: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int | None
    age: float
    queued: float
    ttft: float | None = None
    tenant: str | None = None


class RequestList(msgspec.Struct, kw_only=True):
    """Answer to GET /v1/requests, in the order of arrival."""

    object: str = "list"
    data: list[RequestBody]


class RequestEnded(msgspec.Struct, kw_only=True):
    """Answer to DELETE /v1/requests/{id}."""

    id: str
    object: str = "request"
    cancelled: bool = True


async def _list(contexts: Contexts, context: ServerContext, exchange: Exchange) -> RequestList:
    return RequestList(data=requests_of(contexts(context), exchange))


def requests_of(contexts: Sequence[ServerContext], exchange: Exchange) -> list[RequestBody]:
    """The requests in progress that whoever asks may see, in the order of arrival."""
    now = time.monotonic()
    found = [_body(*one, exchange, now) for one in _seen(contexts, exchange)]
    return sorted(found, key=lambda body: -body.age)


async def _cancel(contexts: Contexts, context: ServerContext, exchange: Exchange) -> RequestEnded:
    """End a request, all prompts of it. Raises ApiError 404 for one that is not there or belongs to another client."""
    asked, ended = exchange.path.removeprefix(_PATH), False
    for owner, request, _ in list(_seen(contexts(context), exchange)):
        name, _, number = request.request_id.rpartition("-")
        if request.request_id == asked or (name == asked and number.isdigit()):
            ended = owner.engine.cancel(request.request_id) or ended
    if not ended:
        message = f"id: no request {shorten(asked, 100)!r} is in progress"
        raise ApiError(404, message, code="request_not_found", param="id")
    return RequestEnded(id=asked)


def _seen(
    contexts: Sequence[ServerContext], exchange: Exchange
) -> Iterator[tuple[ServerContext, Request, RequestOutput]]:
    """The requests that whoever asks may see."""
    for context in contexts:
        for request, output in context.engine.requests():
            if exchange.administrator or request.terms.account == exchange.tenant:
                yield context, request, output


def _body(
    context: ServerContext, request: Request, output: RequestOutput, exchange: Exchange, now: float
) -> RequestBody:
    card, times = context.engine.card, output.timings
    classes, number = card.service_classes, request.terms.service_class
    started, first = times.scheduled, times.first_token
    return RequestBody(
        id=request.request_id,
        model=context.engine.adapter_name(request.adapter) if request.adapter else context.names()[0],
        status="running" if started else "waiting",
        service_class=classes[number].name if number < len(classes) else None,
        priority=min(request.priority, BACKGROUND),
        samples=request.params.n,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=output.usage.cached_tokens,
        completion_tokens=output.usage.completion_tokens,
        max_tokens=request.params.max_tokens,
        age=round(now - request.arrival, 6),
        queued=round((started or now) - request.arrival, 6),
        ttft=round(first - request.arrival, 6) if first else None,
        tenant=request.terms.account[:_TENANT_CHARS] if exchange.administrator else None,
    )


def request_routes(contexts: Contexts) -> tuple[HttpRoute, ...]:
    """The routes of a server with these models."""
    return (
        Get(
            path="/v1/requests", summary="Your requests in progress; an administrator's: all", tag="status",
            handler=partial(_list, contexts), response=RequestList, either=True,
        ),
        Act(
            verb="DELETE", path=_PATH + "{}", rest="id", summary="End a request", tag="status",
            handler=partial(_cancel, contexts), response=RequestEnded, either=True,
            further={404: "no such request of yours is in progress"},
        ),
    )  # fmt: skip


ROUTES = request_routes(lambda context: (context,))
