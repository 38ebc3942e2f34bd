"""What the routes for vectors, scores and labels share: their inputs, and running them."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from quire.answers import Timings
from quire.engine.api import GenerateAsk, InputAsk, OverloadedError, Stream
from quire.engine.front.pool_inputs import POOLING_PARAMS, check_dimensions, check_ids, vector
from quire.objectives import ServiceTerms
from quire.outputs import RequestOutput
from quire.server.context import ServerContext
from quire.server.errors import ApiError, bad_request
from quire.server.exchange import Exchange
from quire.server.request_memory import CHOICE, ENGINE_TOKEN, PROMPT
from quire.server.requests import Prompt
from quire.server.sampling import priority_of
from quire.spec.pooling_facts import PoolingFacts
from quire.types import (
    NO_POOLING,
    FinishReason,
    Request,
    RequestError,
    TokenIds,
)

if TYPE_CHECKING:
    from quire.engine.front.pool_inputs import Row

MAX_INPUTS = 2048  # texts, or pairs of texts, of a request: OpenAI's limit
AHEAD = 128  # texts of a request that the engine has at a time
NUMBER_BYTES = 64  # of an answer: a number in arrays, in lists, and as text
CHARACTERS = 24  # of a number as text, at most

Texts = Annotated[list[str], Meta(max_length=MAX_INPUTS)]
TextOrTexts = str | Texts


class PoolingRequest(msgspec.Struct, kw_only=True):
    """Fields that all these routes share. null means the default for each of them."""

    model: Annotated[str | None, Meta(description="a served name; default: the first")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(
            description="cut longer texts to so many tokens, -1: to what the model takes; they are refused without it"
        ),
    ] = None
    priority: Annotated[
        int | None, Meta(description="lower values run earlier; needs --scheduling-policy priority")
    ] = None
    request_id: Annotated[str | None, Meta(description="becomes part of the response's id")] = None


class PoolingUsage(msgspec.Struct):
    """Token counts of all texts."""

    prompt_tokens: int
    total_tokens: int


class Pooled:
    """The rows of a request's texts in their order, and what they took."""

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        self.rows = [output.pooled for output in outputs]
        tokens = sum(output.usage.prompt_tokens for output in outputs)
        self.usage = PoolingUsage(tokens, tokens)


def pooling_of(context: ServerContext, *tasks: str) -> PoolingFacts:
    """What the model is for. Raises RequestError unless it is one of the tasks; any, if none is named."""
    about = context.card().pooling
    if about is None:
        raise RequestError("model", NO_POOLING)
    if tasks and about.task not in tasks:
        raise RequestError("model", f"this model is for the task {about.task}, not {' or '.join(tasks)}")
    return about


def split_input(given: Prompt, name: str = "input") -> list[str | list[int]]:
    """A text or token ids, or a list of either, as a list. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]  # type: ignore[list-item]
    if len(kinds) != 1:
        what = "is empty" if not kinds else "mixes strings, token ids and lists"
        raise bad_request(name, f"{name}: {what}; expected a string, token ids, or a list of either")
    check_count(name, len(given))
    return given  # type: ignore[return-value]


def check_count(name: str, count: int) -> None:
    """Raise ApiError for no texts, or more than a request may have."""
    if not 0 < count <= MAX_INPUTS:
        raise bad_request(name, f"{name}: has {count} texts, not 1 to {MAX_INPUTS}")


async def encode_inputs(
    context: ServerContext, given: Sequence[str | list[int]], body: PoolingRequest, *, name: str = "input",
    prompt_name: str | None = None, special: bool = True,
) -> list[list[int]]:  # fmt: skip
    """Token ids of texts; lists of ids are checked. Raises RequestError naming the field."""
    pooling_of(context)
    if given and isinstance(given[0], str):
        truncate = body.truncate_prompt_tokens
        asks = [
            InputAsk(text=text, name=name, prompt_name=prompt_name, truncate=truncate, special=special)
            for text in given
            if isinstance(text, str)
        ]
        return await context.engine.encode_inputs(asks)
    card = context.card()
    lists = [ids for ids in given if not isinstance(ids, str)]
    for ids in lists:
        check_ids(name, ids, card.vocab_size, card.max_model_len)
    return lists


async def run_pooled(
    context: ServerContext, exchange: Exchange, prompts: Sequence[list[int]], body: PoolingRequest, name: str = "input"
) -> Pooled:  # fmt: skip
    """The row of each prompt. They are computed in any order, some at a time. Raises as Engine.generate, and ApiError.

    What is left is cancelled when one of them fails, or the caller.
    """
    priority = priority_of(exchange, body.priority)
    asks = [_ask(context, exchange, ids, priority, number) for number, ids in enumerate(prompts)]
    exchange.held.give(context.memory.work)
    about = pooling_of(context)
    numbers = len(prompts) * max(about.dimensions, len(about.labels), 2)
    cost = (
        min(len(asks), AHEAD) * (PROMPT + CHOICE)
        + sum(map(len, prompts)) * ENGINE_TOKEN
        + numbers * NUMBER_BYTES
    )
    await context.memory.take_answer(exchange.held, asks, {name: cost})
    outputs: list[RequestOutput] = []
    charge = await context.tenants.charge(exchange, asks)
    try:
        await _run(context, asks, outputs)
    finally:
        context.tenants.settle(exchange, charge, sum(output.usage.prompt_tokens for output in outputs))
        context.metrics.count(exchange, asks[: len(outputs)], outputs)
    done = Pooled(outputs)
    times = [output.timings for output in outputs]
    exchange.timings = Timings(
        arrival=min(one.arrival for one in times),
        scheduled=min(one.scheduled for one in times),
        finished=max(one.finished for one in times),
    )
    exchange.details |= {"prompt_tokens": done.usage.prompt_tokens, "texts": len(prompts)}
    return done


async def _run(context: ServerContext, asks: Sequence[GenerateAsk], outputs: list[RequestOutput]) -> None:
    """Run all asks, AHEAD at a time; a full queue is waited for while others of this request run."""
    ahead: deque[Stream] = deque()
    try:
        for ask in asks:
            while True:
                if len(ahead) >= AHEAD:
                    outputs.append(await _ended(ahead))
                try:
                    ahead.append(context.engine.generate(ask))
                    break
                except OverloadedError:
                    if not ahead:
                        raise
                    outputs.append(await _ended(ahead))
        while ahead:
            outputs.append(await _ended(ahead))
    finally:
        for stream in ahead:
            stream.cancel()


async def _ended(ahead: deque[Stream]) -> RequestOutput:
    """The output of the first stream, once it has ended."""
    async for delta in ahead[0]:
        if delta.finish_reason is FinishReason.ERROR:
            raise ApiError(500, "the model produced NaN or infinite numbers", code="numerical_error")
    return ahead.popleft().output


def _ask(
    context: ServerContext, exchange: Exchange, ids: list[int], priority: int, number: int
) -> GenerateAsk:
    request = Request(
        request_id=f"pool-{exchange.request_id}-{number}-{uuid.uuid4().hex}",
        prompt_token_ids=TokenIds(ids),
        params=POOLING_PARAMS,
        arrival=time.monotonic(),
        priority=priority,
        tenant=context.tenants.domain(exchange.tenant),
        terms=ServiceTerms(
            account=exchange.tenant,
            weight=context.tenants.get(exchange.tenant).weight,
            tag=context.tenants.tag(exchange),
        ),
        pooling=True,
    )
    return GenerateAsk(request=request, tenant=exchange.tenant, keep_output=False)


async def embed_texts(
    context: ServerContext, exchange: Exchange, texts: Sequence[str | list[int]], body: PoolingRequest, *,
    dimensions: int | None = None, normalise: bool | None = None, prompt_name: str | None = None, special: bool = True,
) -> tuple[list[Row], PoolingUsage]:  # fmt: skip
    """The vectors of texts, for any dialect's route, which watches for a hang-up.

    Raises RequestError, and as run_pooled.
    """
    about = pooling_of(context, "embed")
    check_dimensions(about, dimensions)
    prompts = await encode_inputs(context, texts, body, prompt_name=prompt_name, special=special)
    done = await run_pooled(context, exchange, prompts, body)
    return [vector(about, row, dimensions, normalise) for row in done.rows], done.usage
