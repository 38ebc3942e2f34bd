"""GET /v1/requests/{id}/explain and /v1/cache/misses: where the time of a request went, and why prompts are not cached.

A client sees its own requests: that of another key is as unknown as one that never was. An administrator sees all, but
no texts.
"""

from __future__ import annotations

import asyncio

import msgspec

from quire.server.context import ServerContext
from quire.server.errors import ApiError
from quire.server.exchange import Exchange
from quire.server.query import query_of, replica_of
from quire.server.routes import Act, Get, HttpRoute
from quire.steplog import log_rows as rows
from quire.steplog.explain import PARTS, explain, sentence, text_of
from quire.steplog.log_files import HEADER, framed, read_rows
from quire.steplog.misses import MissText, Template, templates

_ROW_MEMORY = 8  # bytes of rows for one of the log, the steps of a long life among them
_BEHIND = 8  # requests that are named
_TEMPLATES = 10


class PartBody(msgspec.Struct):
    """A part of the time of a request."""

    name: str
    ms: float
    says: str


class SpanBody(msgspec.Struct):
    """A span of the life of a request; `start_ms` from its first byte."""

    start_ms: float
    ms: float
    part: str
    detail: str


class BehindBody(msgspec.Struct):
    """What ran while a request waited; `id` is empty for a request of somebody else."""

    id: str
    kind: str
    ms: float


class MissBody(msgspec.Struct):
    """Why tokens of a prompt were not in the cache. The texts are those around the first token that differs."""

    kind: str
    hit_tokens: int
    lost_tokens: int
    differs_at: int
    ours: str
    theirs: str
    changes: str


class StepBody(msgspec.Struct):
    """A step that computed something of a request: first position and tokens of each of its rows."""

    number: int
    start_ms: float
    ms: float
    rows: list[tuple[int, int]]


class ExplainBody(msgspec.Struct):
    """Where the time of a request went: parts that sum to `total_ms`, from the first byte read to the last written."""

    id: str
    finished: bool
    total_ms: float
    cause: str
    prompt_tokens: int
    cached_tokens: int
    chunks: int  # steps that computed some of the prompt
    sentence: str
    parts: list[PartBody]
    timeline: list[SpanBody]
    behind: list[BehindBody]
    cache: MissBody | None
    text: str
    steps: list[StepBody]
    stages: dict[str, float]  # ms of its steps: embed, layers, project, sample; while a profile measures them


class TemplateBody(msgspec.Struct):
    """Prompts that would be found if what changes in them came later: how many, and the tokens that they lost."""

    requests: int
    lost_tokens: int
    differs_at: int
    changes: str
    ours: str
    theirs: str


class MissesBody(msgspec.Struct):
    """What the prompts of a client lost lately: tokens by the reason, and the templates that lost most."""

    lost_tokens: dict[str, int]
    templates: list[TemplateBody]


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"{name!r} is not a request of yours, or it was too long ago", code="not_found")


async def _log(
    context: ServerContext, exchange: Exchange, request_id: str = "", replica: int = 0
) -> list[rows.AnyRow]:
    """The rows about requests of a replica, or of the one that has a request, with the steps in its life.

    They count as a body that is being read.
    """
    data = await _data(context, exchange, request_id, replica)
    return await asyncio.to_thread(_rows_of, data, request_id) if data else []


async def _data(context: ServerContext, exchange: Exchange, request_id: str, replica: int) -> bytes:
    context.card()
    data = await context.engine.log(request_id, replica)
    pool = context.memory.work
    await exchange.held.take(pool, min(pool.limit, _ROW_MEMORY * len(data)))
    return data


def _replicas(context: ServerContext) -> int:
    return max(1, len(context.engine.stats.replica_requests))


def _rows_of(data: bytes, request_id: str) -> list[rows.AnyRow]:
    found = read_rows(data, keep=lambda row: not isinstance(row, rows.Step)).rows
    arrived = [row for row in found if isinstance(row, rows.Arrived) and row.request_id == request_id]
    if not arrived:
        return found
    start, number = arrived[-1].at, arrived[-1].number
    ends = [row.at for row in found if isinstance(row, rows.Ended | rows.Aborted) and row.number == number]
    end = max(ends) if len(ends) >= arrived[-1].params.get("n", 1) else None
    return read_rows(
        data,
        keep=lambda row: (
            not isinstance(row, rows.Step)
            or (row.at + row.updated >= start and (end is None or row.at <= end))
        ),
    ).rows


async def explain_request(context: ServerContext, exchange: Exchange) -> ExplainBody:
    """Explain a request of the client. Raises ApiError 404 for any other."""
    name = exchange.path.removeprefix("/v1/requests/").removesuffix("/explain")
    with_steps = query_of(exchange.scope["query_string"], ("steps",)).get("steps", "") in {"1", "true"}
    request_id = context.owners.find(name, exchange)
    if request_id is None:
        raise _unknown(name)
    log = await _log(context, exchange, request_id)
    found = await asyncio.to_thread(explain, log, request_id)
    if found is None:
        raise _unknown(name)
    names = {
        row.number: row.request_id
        for row in log
        if isinstance(row, rows.Arrived) and context.owners.find(row.request_id, exchange)
    }
    first = found.spans[0].start if found.spans else 0
    behind = [
        BehindBody(names.get(number, ""), kind, time / 1e6)
        for (number, kind), time in found.behind.most_common(_BEHIND)
    ]
    return ExplainBody(
        id=request_id,
        finished=found.finished,
        total_ms=found.total / 1e6,
        cause=found.cause(),
        prompt_tokens=found.prompt,
        cached_tokens=found.cached,
        chunks=found.chunks,
        sentence=sentence(found, names),
        parts=[PartBody(part, time / 1e6, PARTS[part][0]) for part, time in found.parts().items()],
        timeline=[
            SpanBody((span.start - first) / 1e6, (span.end - span.start) / 1e6, span.part, span.detail)
            for span in found.spans
        ],
        behind=behind,
        cache=_miss(context, exchange, found.miss),
        text=text_of(found, names),
        steps=[_step(step, first) for step in found.took_part] if with_steps else [],
        stages={name: time / 1e6 for name, time in found.stages().items()},
    )


def _step(step: rows.Step, first: int) -> StepBody:
    pairs = [(step.rows[i + 1], step.rows[i + 2]) for i in range(0, len(step.rows), 4)]
    return StepBody(step.number, (step.at - first) / 1e6, step.updated / 1e6, pairs)


def _own_domain(context: ServerContext, exchange: Exchange) -> bool:
    """Whether all that the client's prompts may find in the cache is its own."""
    return not exchange.tenant or context.config.prefix_cache_sharing == "key"


def _miss(context: ServerContext, exchange: Exchange, miss: rows.Missed | None) -> MissBody | None:
    if miss is None:
        return None
    if exchange.administrator:  # who sees the requests of all, and the texts of none
        return MissBody(miss.kind, miss.hit, miss.lost, miss.differs_at, "", "", "")
    text = _text(context, miss, own=_own_domain(context, exchange))
    return MissBody(miss.kind, miss.hit, miss.lost, miss.differs_at, text.ours, text.theirs, text.changes)


def _text(context: ServerContext, miss: rows.Missed, *, own: bool) -> MissText:
    pieces = context.engine.pieces
    return MissText.of(miss, lambda ids: "".join(pieces(ids)), own=own)


async def cache_misses(context: ServerContext, exchange: Exchange) -> MissesBody:
    """What the latest prompts of the client lost in the cache."""
    own, missed = _own_domain(context, exchange), []
    for replica in range(_replicas(context)):
        log = await _log(context, exchange, replica=replica)
        numbers = {
            row.number
            for row in log
            if isinstance(row, rows.Arrived) and context.owners.find(row.request_id, exchange)
        }
        missed += [row for row in log if isinstance(row, rows.Missed) and row.number in numbers]
        exchange.held.give(
            context.memory.work
        )  # before the next: a request that holds some must not wait for more
    lost: dict[str, int] = {}
    for row in missed:
        lost[row.kind] = lost.get(row.kind, 0) + row.lost
    found = templates([(row, _text(context, row, own=own)) for row in missed if row.ours])
    return MissesBody(lost, [_template(one) for one in found[:_TEMPLATES]])


def _template(one: Template) -> TemplateBody:
    return TemplateBody(
        one.requests, one.lost, one.differs_at, one.text.changes, one.text.ours, one.text.theirs
    )


async def engine_log(context: ServerContext, exchange: Exchange) -> bytes:
    """The latest rows of a replica as a log, for simulations; without the texts around misses: they are of clients."""
    replica = replica_of(exchange.scope["query_string"], _replicas(context))
    data = await _data(context, exchange, "", replica)
    return await asyncio.to_thread(_without_texts, data)


def _without_texts(data: bytes) -> bytes:
    if not data:
        return data
    made = [
        rows.Missed(row.at, row.number, row.kind, row.hit, row.lost, row.differs_at)
        if isinstance(row, rows.Missed)
        else row
        for row in read_rows(data).rows
    ]
    return HEADER + b"".join(framed(rows.encode(row)) for row in made)


ROUTES: tuple[HttpRoute, ...] = (
    Act(
        verb="GET", path="/v1/requests/{}/explain", rest="id", summary="Where the time of a request went", tag="status",
        handler=explain_request, response=ExplainBody, query=("steps",), either=True,
        further={404: "no request of the client has this id"},
    ),
    Get(
        path="/v1/cache/misses", summary="Why prompts of the client were not in the prefix cache", tag="status",
        handler=cache_misses, response=MissesBody,
    ),
    Act(
        verb="GET", path="/admin/log", summary="The latest rows of the engine's log, for quire whatif", tag="admin",
        handler=engine_log, response=str, query=("replica",), media=b"application/octet-stream", admin=True, api="",
    ),
)  # fmt: skip
