"""POST /v1/embeddings and /pooling: the vectors of texts."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from quire.engine.front.pool_inputs import probabilities, vector
from quire.server.answering import answer_id
from quire.server.context import ServerContext
from quire.server.exchange import Body, Exchange, HangUpWatch, off_loop
from quire.server.pooled import (
    CHARACTERS,
    PoolingRequest,
    PoolingUsage,
    embed_texts,
    encode_inputs,
    pooling_of,
    run_pooled,
    split_input,
)
from quire.server.requests import Prompt
from quire.server.routes import Post

if TYPE_CHECKING:
    from quire.engine.front.pool_inputs import Row

_encode = msgspec.json.Encoder().encode


class _InputRequest(PoolingRequest, kw_only=True):
    input: Annotated[Prompt, Meta(description="a text, token ids, or a list of either")]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64: float32 numbers, little endian")
    ] = None
    add_special_tokens: Annotated[bool | None, Meta(description="what the tokenizer adds around a text")] = (
        None
    )


class EmbeddingRequest(_InputRequest, kw_only=True):
    """Body of POST /v1/embeddings."""

    dimensions: Annotated[int | None, Meta(description="keep the first numbers of each vector")] = None
    prompt_name: Annotated[
        str | None, Meta(description="the prompt of the checkpoint that is put before each text")
    ] = None
    normalize: Annotated[
        bool | None, Meta(description="whether vectors have length one; default: as the checkpoint says")
    ] = None


class EmbeddingData(msgspec.Struct, kw_only=True):
    """The vector of one text."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    """Vectors, in the order of the texts."""

    object: str = "list"
    data: list[EmbeddingData]
    model: str
    usage: PoolingUsage


class PoolingInputRequest(_InputRequest, kw_only=True):
    """Body of POST /pooling."""


class PoolingData(msgspec.Struct, kw_only=True):
    """What the model gives for one text."""

    index: int
    object: str = "pooling"
    data: list[float] | str


class PoolingResponse(msgspec.Struct, kw_only=True):
    """Rows of numbers, in the order of the texts."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PoolingData]
    usage: PoolingUsage


async def embeddings(context: ServerContext, exchange: Exchange, read: Body[EmbeddingRequest]) -> None:
    """The vector of each text."""
    body = read.value
    model = context.model(body.model, exchange)
    async with exchange.watch() as watch:
        rows, usage = await embed_texts(
            context,
            exchange,
            split_input(body.input),
            body,
            dimensions=body.dimensions,
            normalise=body.normalize,
            prompt_name=body.prompt_name,
            special=body.add_special_tokens is not False,
        )

        def made() -> EmbeddingResponse:
            data = [EmbeddingData(index=i, embedding=_numbers(row, body)) for i, row in enumerate(rows)]
            return EmbeddingResponse(data=data, model=model, usage=usage)

        await respond_rows(context, exchange, watch, rows, made)


async def pooling(context: ServerContext, exchange: Exchange, read: Body[PoolingInputRequest]) -> None:
    """The row of each text: its vector, or the logits of its labels."""
    body = read.value
    model, about = context.model(body.model, exchange), pooling_of(context)
    name = answer_id("pool", body.request_id)
    special = body.add_special_tokens is not False
    async with exchange.watch() as watch:
        prompts = await encode_inputs(context, split_input(body.input), body, special=special)
        done = await run_pooled(context, exchange, prompts, body)
        rows = [
            vector(about, row) if about.task == "embed" else probabilities(about, row, squash=False)
            for row in done.rows
        ]

        def made() -> PoolingResponse:
            data = [PoolingData(index=i, data=_numbers(row, body)) for i, row in enumerate(rows)]
            return PoolingResponse(
                id=name, created=int(time.time()), model=model, data=data, usage=done.usage
            )

        await respond_rows(context, exchange, watch, rows, made)


async def respond_rows(
    context: ServerContext,
    exchange: Exchange,
    watch: HangUpWatch,
    rows: list[Row],
    made: Callable[[], msgspec.Struct],
) -> None:
    """Answer with what is made, off the event loop where there are many numbers; a slow reader is ended."""
    body = await off_loop(sum(map(len, rows)) * CHARACTERS, lambda: _encode(made()))
    with context.watched(watch):
        await exchange.respond(200, body)


def _numbers(row: Row, body: _InputRequest) -> list[float] | str:
    if body.encoding_format == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers


ROUTES = (
    Post(
        path="/v1/embeddings", summary="Vectors of texts", tag="pooling", handler=embeddings,
        request=EmbeddingRequest, response=EmbeddingResponse,
    ),
    Post(
        path="/pooling", summary="Vectors of texts, or logits of labels", tag="pooling", handler=pooling,
        request=PoolingInputRequest, response=PoolingResponse,
    ),
)  # fmt: skip
