"""Ollama's chat and generate, and its lists of models, translated to a chat request."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from quire import __version__
from quire.engine.api import GenerateAsk
from quire.server.answering import AnswerStream, StreamForm, answer_whole, generating_model
from quire.server.chat import prepare_chat
from quire.server.context import ServerContext
from quire.server.dialects.asking import Renames, renamed, thinking_fields
from quire.server.dialects.keep_alive import HEEDED, check_keep_alive
from quire.server.dialects.ollama_answers import LINES, AnswerHead, OllamaStream, answer_pieces, loaded
from quire.server.dialects.ollama_types import (
    OLLAMA_ERRORS,
    PARAMETER_OPTIONS,
    REFUSED,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaDetails,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaModel,
    OllamaModels,
    OllamaOptions,
    OllamaVersion,
)
from quire.server.errors import bad_request
from quire.server.exchange import Body, Exchange
from quire.server.requests import ChatCompletionRequest
from quire.server.routes import Get, HttpRoute, Post
from quire.text.infill import InfillAsk

_MAPPED = {**PARAMETER_OPTIONS, "stop": "stop"}
# Options that ask for what happens anyway with this value alone.
_FIXED = {
    "tfs_z": 1.0, "penalize_newline": True,
}  # fmt: skip
_NAMES: Renames = {rf"{inside}\b": f"options.{name}" for name, inside in _MAPPED.items()} | {
    r"chat_template_kwargs|thinking_token_budget|reasoning_effort": "think"
}


async def chat(context: ServerContext, exchange: Exchange, read: Body[OllamaChatRequest]) -> bytes | None:
    """Answer a conversation, as lines unless `stream` is false."""
    body = read.value
    head = _head(context, exchange, body, chat=True)
    if not body.messages:
        return loaded(head, leaves=exchange.scope.get(HEEDED) == 0)
    fields: dict[str, Any] = {"messages": _messages(body.messages), "tools": body.tools}
    body.messages = None
    await _answer(context, exchange, read, head, fields)
    return None


async def generate(
    context: ServerContext, exchange: Exchange, read: Body[OllamaGenerateRequest]
) -> bytes | None:
    """Answer a prompt as a conversation of one turn, continue a raw one, or fill in what stands before a suffix."""
    body = read.value
    head = _head(context, exchange, body, chat=False)
    if not body.prompt and not body.suffix:
        return loaded(head, leaves=exchange.scope.get(HEEDED) == 0)
    if body.raw or body.suffix:
        if body.system:
            raise bad_request("system", "system: not part of a raw prompt, nor of one with a suffix")
        raw = InfillAsk(prefix=body.prompt, suffix=body.suffix) if body.suffix else body.prompt
        await _answer(context, exchange, read, head, {"messages": []}, raw=raw)
        return None
    said = (("system", body.system), ("user", body.prompt))
    fields = {"messages": [{"role": role, "content": content} for role, content in said if content]}
    await _answer(context, exchange, read, head, fields)
    return None


def served(context: ServerContext, name: str | None, exchange: Exchange) -> str:
    """The served name for one that may have the tag "latest". Raises ApiError 404."""
    if name is not None and context.served.find(name) is None:
        name = name.removesuffix(":latest")
    return context.model(name, exchange)


def _head(
    context: ServerContext, exchange: Exchange, body: OllamaChatRequest | OllamaGenerateRequest, *, chat: bool
) -> AnswerHead:
    """What the answer begins with. Raises ApiError for fields that ask for what is not done."""
    context.card()
    generating_model(context, exchange, served(context, body.model, exchange))
    for name in ("truncate", "shift"):
        if getattr(body, name):
            message = (
                f"{name}: not supported; a prompt that does not fit is refused, and the context does not move"
            )
            raise bad_request(name, message, "unsupported_parameter")
    check_keep_alive(exchange, body.keep_alive)
    return AnswerHead(body.model or context.names()[0], time_text(datetime.now(UTC)), chat)


def time_text(moment: datetime) -> str:
    """A time in Ollama's form."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def _answer(
    context: ServerContext,
    exchange: Exchange,
    read: Body[Any],
    head: AnswerHead,
    fields: dict[str, Any],
    raw: str | InfillAsk | None = None,
) -> None:
    """Answer, whole or as a stream."""
    body: OllamaChatRequest | OllamaGenerateRequest = read.value
    options = body.options or OllamaOptions()
    window = _window(context, options)
    with renamed(_NAMES if raw is not None or head.chat else {"messages": "prompt", **_NAMES}):
        if body.think is not None and raw is None:
            fields |= thinking_fields(context, body.think, "think")
        elif body.think:
            raise bad_request("think", "think: a raw prompt is continued by one text")
        scores: dict[str, Any] = {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
        asked = ChatCompletionRequest(**fields, **_sampling(options), **scores, format=body.format)
        name = f"ollama-{uuid.uuid4().hex}"
        found = await prepare_chat(context, exchange, Body(read.size, asked), name, window=window, raw=raw)
        await _write(context, exchange, found.ask, head, stream=body.stream is not False)


async def _write(
    context: ServerContext, exchange: Exchange, ask: GenerateAsk, head: AnswerHead, *, stream: bool
) -> None:
    if not stream:
        pieces_of = partial(answer_pieces, head, context.texts)
        await answer_whole(context, exchange, [ask], pieces_of, logprobs="top_logprobs")
        return
    lines = OllamaStream(head, context.texts)
    form = StreamForm(
        lines.chunk_of, lines.last, around=lines.around if ask.reading is None else None, direct=lines.direct,
        media=LINES, ping=b"",  # its clients read every line as JSON
    )  # fmt: skip
    await AnswerStream(context, exchange, form, logprobs="top_logprobs").write([ask])


def _sampling(options: OllamaOptions) -> dict[str, Any]:
    """Fields of a chat request. Raises ApiError for options that would change the answer and are not supported."""
    for name, same in _FIXED.items():
        given = getattr(options, name)
        if given is not None and given != same:
            message = f"options.{name}: not supported, unless it is {same}"
            raise bad_request(f"options.{name}", message, "unsupported_parameter")
    found = {inside: getattr(options, name) for name, inside in _MAPPED.items()}
    if found["max_tokens"] in {-1, -2}:  # without a limit, and to the end of the context
        found["max_tokens"] = None
    return found


def _window(context: ServerContext, options: OllamaOptions) -> int | None:
    """The context that the request asks for. Raises ApiError for one that is larger than the model's."""
    asked, most = options.num_ctx, context.engine.card.max_model_len
    if asked is None:
        return None
    if not 2 <= asked <= most:
        message = (
            f"options.num_ctx: {asked} is not in [2, {most}], from two tokens to the context of the server"
        )
        raise bad_request("options.num_ctx", f"{message} (--max-model-len)", "context_length_exceeded")
    return asked


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages of a chat: calls without an id get one, and results belong to the calls before them."""
    found: list[dict[str, Any]] = []
    pending: list[tuple[str, str]] = []  # names and ids of calls without a result
    for index, message in enumerate(messages):
        made: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking is not None:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                (call.id or f"call{index:03d}{number:02d}", call.function)
                for number, call in enumerate(message.tool_calls)
            ]
            made["tool_calls"] = [
                {"id": key, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for key, call in calls
            ]
            pending = [(call.name, key) for key, call in calls]
        if message.role == "tool":
            made |= _result(message, pending)
        found.append(made)
    return found


def _result(message: OllamaMessage, pending: list[tuple[str, str]]) -> dict[str, Any]:
    """The fields of a message with a result; its call is taken from `pending`."""
    name, key = message.tool_name, message.tool_call_id
    match = next(
        (call for call in pending if key == call[1] or (key is None and name in {None, call[0]})), None
    )
    if match is not None:
        pending.remove(match)
        name, key = match
    return {field: value for field, value in (("name", name), ("tool_call_id", key)) if value is not None}


async def tags(context: ServerContext, _: Exchange) -> OllamaModels:
    """The served names."""
    card = context.card()
    details = OllamaDetails(card.architecture, [card.architecture])
    return OllamaModels([
        OllamaModel(
            name=one.name, model=one.name, digest=one.digest or card.config_sha256, details=details,
            modified_at=time_text(datetime.fromtimestamp((one.adapter or card).created, UTC)),
            context_length=card.max_model_len,
        )
        for one in context.served.all()
    ])  # fmt: skip


async def version(_: ServerContext, _exchange: Exchange) -> OllamaVersion:
    """The version of Quire."""
    return OllamaVersion(__version__)


ROUTES: tuple[HttpRoute, ...] = (
    Post(
        path="/api/chat", summary="Answer a conversation, in Ollama's form", tag="ollama", handler=chat,
        request=OllamaChatRequest, response=OllamaChatAnswer, chunk=OllamaChatAnswer, refused=REFUSED,
        ignored=frozenset(), stream_media=LINES.decode(), api="ollama", errors=OLLAMA_ERRORS,
    ),
    Post(
        path="/api/generate", summary="Answer a prompt, in Ollama's form", tag="ollama", handler=generate,
        request=OllamaGenerateRequest, response=OllamaGenerateAnswer, chunk=OllamaGenerateAnswer,
        refused=REFUSED, ignored=frozenset(), stream_media=LINES.decode(), api="ollama", errors=OLLAMA_ERRORS,
    ),
    *(
        Get(
            path=path, summary="The served models, in Ollama's form", tag="ollama", handler=tags,
            response=OllamaModels, api="ollama", errors=OLLAMA_ERRORS,
        )
        for path in ("/api/tags", "/api/ps")
    ),
    Get(
        path="/api/version", summary="Version of Quire, in Ollama's form", tag="ollama", handler=version,
        response=OllamaVersion, api="ollama", errors=OLLAMA_ERRORS,
    ),
)  # fmt: skip
