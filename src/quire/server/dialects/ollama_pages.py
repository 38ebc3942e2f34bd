"""Ollama's vectors of texts, its facts about a model, and the management of models, which there is none of."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, NoReturn

import msgspec

from quire.server.context import ServerContext
from quire.server.dialects.asking import renamed
from quire.server.dialects.keep_alive import check_keep_alive
from quire.server.dialects.ollama import served, time_text
from quire.server.dialects.ollama_types import (
    OLLAMA_ERRORS,
    PARAMETER_OPTIONS,
    OllamaDetails,
    OllamaEmbedAnswer,
    OllamaEmbeddingAnswer,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaShown,
    OllamaShowRequest,
)
from quire.server.embeddings import respond_rows
from quire.server.errors import ApiError, bad_request, shorten
from quire.server.exchange import Body, Exchange
from quire.server.pooled import PoolingRequest, check_count, embed_texts
from quire.server.routes import Act, HttpRoute, Post
from quire.text.infill import InfillAsk
from quire.types import RequestError

_MANAGEMENT = (
    ("POST", "/api/pull"), ("POST", "/api/push"), ("POST", "/api/create"), ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
)  # fmt: skip
_TO_THE_LIMIT = -1  # of the tokens that a model takes


async def embed(
    context: ServerContext, exchange: Exchange, read: Body[OllamaEmbedRequest]
) -> OllamaEmbedAnswer | None:
    """The vector of each text, of length one."""
    body = read.value
    name = _model(context, exchange, body)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not any(texts):
        return OllamaEmbedAnswer(model=name, embeddings=[])
    check_count("input", len(texts))
    cut = PoolingRequest(truncate_prompt_tokens=_TO_THE_LIMIT if body.truncate else None)
    async with exchange.watch() as watch:
        rows, usage = await embed_texts(
            context, exchange, texts, cut, dimensions=body.dimensions, normalise=True
        )
        took = round((time.monotonic() - exchange.arrival) * 1e9)

        def made() -> OllamaEmbedAnswer:
            return OllamaEmbedAnswer(
                model=name, embeddings=[row.tolist() for row in rows], total_duration=took,
                prompt_eval_count=usage.prompt_tokens,
            )  # fmt: skip

        await respond_rows(context, exchange, watch, rows, made)
    return None


async def embeddings(
    context: ServerContext, exchange: Exchange, read: Body[OllamaEmbeddingRequest]
) -> OllamaEmbeddingAnswer | None:
    """The vector of a text, of the length that the model gives it."""
    body = read.value
    _model(context, exchange, body)
    if not body.prompt:
        return OllamaEmbeddingAnswer([])
    async with exchange.watch() as watch:
        with renamed({r"input\b": "prompt"}):
            rows, _ = await embed_texts(context, exchange, [body.prompt], PoolingRequest(), normalise=False)
        await respond_rows(context, exchange, watch, rows, lambda: OllamaEmbeddingAnswer(rows[0].tolist()))
    return None


def _model(
    context: ServerContext, exchange: Exchange, body: OllamaEmbedRequest | OllamaEmbeddingRequest
) -> str:
    """The name of the model for the answer. Raises ApiError for what cannot be done."""
    context.card()
    exchange.details["model"] = served(context, body.model, exchange)
    check_keep_alive(exchange, body.keep_alive)
    for name, given in (body.options or {}).items():
        if given is not None:
            field = f"options.{shorten(name, 100)}"
            raise bad_request(field, f"{field}: vectors have no parameters", "unsupported_parameter")
    return body.model or context.names()[0]


async def show(context: ServerContext, exchange: Exchange, read: Body[OllamaShowRequest]) -> OllamaShown:
    """Facts about a served model."""
    body = read.value
    if body.name is not None and body.model not in {None, body.name}:
        raise bad_request("name", "name: differs from model; set only one of them")
    context.card()
    served(context, body.model or body.name, exchange)
    return await shown(context)


async def shown(context: ServerContext) -> OllamaShown:
    """Facts about the model of a context, which is loaded."""
    card = context.card()
    names = {inside: name for name, inside in PARAMETER_OPTIONS.items()}
    parameters = [(names[name], given) for name, given in card.default_sampling.items() if name in names]
    info: dict[str, Any] = {
        "general.architecture": card.architecture,
        f"{card.architecture}.context_length": card.max_model_len,
        f"{card.architecture}.vocab_size": card.vocab_size,
    }
    return OllamaShown(
        parameters="\n".join(f"{name} {msgspec.json.encode(given).decode()}" for name, given in parameters),
        template=card.chat_template,
        details=OllamaDetails(card.architecture, [card.architecture]),
        model_info=info,
        capabilities=await _capabilities(context),
        modified_at=time_text(datetime.fromtimestamp(card.created, UTC)),
    )


async def _capabilities(context: ServerContext) -> list[str]:
    """What the model can do, in Ollama's words."""
    card = context.card()
    if card.pooling is not None:
        return ["embedding"] if card.pooling.task == "embed" else []
    reading = context.engine.reading(None)
    thinks = reading is not None and reading.regions.spec.reasoning is not None
    calls = card.answers.get("tool_calls", {}).get("format") is not None
    found = {"completion": True, "tools": calls, "insert": await _fills_in(context), "thinking": thinks}
    return [name for name, can in found.items() if can]


async def _fills_in(context: ServerContext) -> bool:
    """Whether the tokenizer has tokens for a suffix."""
    try:
        await context.engine.encode_infill(InfillAsk(prefix="", suffix=""))
    except RequestError:
        return False
    return True


async def manage(_: ServerContext, exchange: Exchange) -> NoReturn:
    """Refuse to manage models. Raises ApiError."""
    message = (
        f"{exchange.path}: not done by this server; one with --pull-limit pulls, copies and deletes models for "
        "administrators, and none makes or sends them"
    )
    raise ApiError(400, message, code="unsupported_route")


ROUTES: tuple[HttpRoute, ...] = (
    Post(
        path="/api/embed", summary="Vectors of texts, in Ollama's form", tag="ollama", handler=embed,
        request=OllamaEmbedRequest, response=OllamaEmbedAnswer, ignored=frozenset(), api="ollama",
        errors=OLLAMA_ERRORS,
    ),
    Post(
        path="/api/embeddings", summary="The vector of a text, in Ollama's older form", tag="ollama",
        handler=embeddings, request=OllamaEmbeddingRequest, response=OllamaEmbeddingAnswer, ignored=frozenset(),
        api="ollama", errors=OLLAMA_ERRORS,
    ),
    Post(
        path="/api/show", summary="Facts about a model, in Ollama's form", tag="ollama", handler=show,
        request=OllamaShowRequest, response=OllamaShown, api="ollama", errors=OLLAMA_ERRORS,
        refused={"system": ("",), "template": ("",), "options": ({},)}, ignored=frozenset(),
    ),
    *(
        Act(
            verb=verb, path=path, summary="Refused: models are not managed here", tag="ollama", handler=manage,
            response=dict, api="ollama", errors=OLLAMA_ERRORS,
        )
        for verb, path in _MANAGEMENT
    ),
)  # fmt: skip
