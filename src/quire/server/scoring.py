"""POST /score, /rerank and /classify: how well texts go together, and the labels of texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.engine.api import InputAsk
from quire.engine.front.pool_inputs import probabilities, score, similarities
from quire.server.answering import answer_id
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Body, Exchange
from quire.server.pooled import (
    MAX_INPUTS,
    PoolingRequest,
    PoolingUsage,
    TextOrTexts,
    check_count,
    encode_inputs,
    pooling_of,
    run_pooled,
    split_input,
)
from quire.server.requests import Prompt
from quire.server.routes import HttpRoute, Post
from quire.types import RequestError

_ACTIVATION = Meta(description="false: the logit in place of what the model's activation makes of it")
_INSTRUCTION = Meta(description="what a decoder judges texts by")


class _PairRequest(PoolingRequest, kw_only=True):
    instruction: Annotated[str | None, _INSTRUCTION] = None
    use_activation: Annotated[bool | None, _ACTIVATION] = None


class ScoreRequest(_PairRequest, kw_only=True):
    """Body of POST /score: one text or as many as text_2 has, and the texts that are compared with them."""

    text_1: TextOrTexts
    text_2: TextOrTexts


class ScoreData(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    """Scores, in the order of text_2."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: PoolingUsage


class RerankDocument(msgspec.Struct):
    """A text to rank."""

    text: str


_Documents = Annotated[list[str | RerankDocument], Meta(max_length=MAX_INPUTS)]


class RerankRequest(_PairRequest, kw_only=True):
    """Body of POST /rerank, as Jina's and Cohere's."""

    query: str
    documents: _Documents
    top_n: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="the number of best documents to return; default: all"),
    ] = None
    return_documents: Annotated[bool | None, Meta(description="repeat the texts; default true")] = None


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A document by its place in the request, and how well it answers the query."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(msgspec.Struct, kw_only=True):
    """Documents, the best first; equal ones in the order of the request."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


class ClassifyRequest(PoolingRequest, kw_only=True):
    """Body of POST /classify."""

    input: Annotated[Prompt, Meta(description="a text, token ids, or a list of either")]
    use_activation: Annotated[bool | None, _ACTIVATION] = None


class ClassifyData(msgspec.Struct, kw_only=True):
    """The likeliest label of a text, and the probability of each label in the order of the model's config."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    """Labels, in the order of the texts."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ClassifyData]
    usage: PoolingUsage


async def score_texts(context: ServerContext, exchange: Exchange, read: Body[ScoreRequest]) -> ScoreResponse:
    """The score of each pair of texts."""
    body = read.value
    model = context.model(body.model, exchange)
    first, second = ([given] if isinstance(given, str) else given for given in (body.text_1, body.text_2))
    check_count("text_2", len(second))
    if len(first) not in {1, len(second)}:
        raise bad_request(
            "text_1", f"text_1: {len(first)} texts are neither 1 nor the {len(second)} of text_2"
        )
    scores, usage = await _scores(context, exchange, first, second, body, name="text_2")
    return ScoreResponse(
        id=answer_id("score", body.request_id),
        created=int(time.time()),
        model=model,
        data=[ScoreData(index=i, score=found) for i, found in enumerate(scores)],
        usage=usage,
    )


async def rerank(context: ServerContext, exchange: Exchange, read: Body[RerankRequest]) -> RerankResponse:
    """Documents by how well they answer a query."""
    body = read.value
    model = context.model(body.model, exchange)
    check_count("documents", len(body.documents))
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    scores, usage = await _scores(context, exchange, [body.query], texts, body, name="documents")
    order = sorted(range(len(texts)), key=lambda number: -scores[number])[: body.top_n]
    repeat = body.return_documents is not False
    results = [
        RerankResult(
            index=number,
            relevance_score=scores[number],
            document=RerankDocument(texts[number]) if repeat else None,
        )
        for number in order
    ]
    return RerankResponse(id=answer_id("rerank", body.request_id), model=model, results=results, usage=usage)


async def _scores(
    context: ServerContext, exchange: Exchange, first: Sequence[str], second: Sequence[str], body: _PairRequest, *,
    name: str,
) -> tuple[list[float], PoolingUsage]:  # fmt: skip
    """Scores of pairs, `first` being one text for all or one for each: a cross-encoder's, or the cosines of vectors."""
    about, squash = pooling_of(context, "score", "embed"), body.use_activation is not False
    ones = first if len(first) == len(second) else [*first] * len(second)
    if about.task == "embed":
        prompts = await encode_inputs(context, [*first, *second], body, name=name)
    else:
        asks = [
            InputAsk(text=one, second=other, name=name, truncate=body.truncate_prompt_tokens,
                     instruction=body.instruction)
            for one, other in zip(ones, second, strict=True)
        ]  # fmt: skip
        prompts = await context.engine.encode_inputs(asks)
    async with exchange.watch():
        done = await run_pooled(context, exchange, prompts, body, name)
    if about.task == "score":
        return [score(about, row, squash=squash) for row in done.rows], done.usage
    return similarities(about, done.rows, len(first)), done.usage


async def classify(
    context: ServerContext, exchange: Exchange, read: Body[ClassifyRequest]
) -> ClassifyResponse:
    """The labels of each text."""
    body = read.value
    model, about = context.model(body.model, exchange), pooling_of(context, "classify", "score")
    if not about.labels:
        raise RequestError("model", "this model has no labels")
    prompts = await encode_inputs(context, split_input(body.input), body)
    async with exchange.watch():
        done = await run_pooled(context, exchange, prompts, body)
    data = []
    for i, row in enumerate(done.rows):
        probs: list[float] = probabilities(about, row, squash=body.use_activation is not False).tolist()
        label = about.labels[max(range(len(probs)), key=probs.__getitem__)]
        data.append(ClassifyData(index=i, label=label, probs=probs, num_classes=len(probs)))
    return ClassifyResponse(
        id=answer_id("classify", body.request_id),
        created=int(time.time()),
        model=model,
        data=data,
        usage=done.usage,
    )


def _score(path: str) -> HttpRoute:
    return Post(
        path=path, summary="Scores of pairs of texts", tag="pooling", handler=score_texts,
        request=ScoreRequest, response=ScoreResponse,
    )  # fmt: skip


def _rerank(path: str) -> HttpRoute:
    return Post(
        path=path, summary="Documents by how well they answer a query", tag="pooling", handler=rerank,
        request=RerankRequest, response=RerankResponse,
    )  # fmt: skip


ROUTES: tuple[HttpRoute, ...] = (
    *map(_score, ("/score", "/v1/score")),
    *map(_rerank, ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")),
    Post(
        path="/classify", summary="Labels of texts", tag="pooling", handler=classify,
        request=ClassifyRequest, response=ClassifyResponse,
    ),
)  # fmt: skip
