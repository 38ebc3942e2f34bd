"""POST /v1/chat/completions and its rendering."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from quire.engine.api import StreamDelta
from quire.server import fields
from quire.server.answering import (
    EventStream,
    check_streaming,
    make_envelope,
    optional,
    read_body,
    run_whole,
    wants_timings,
    wants_usage,
)
from quire.server.chunks import Chunks, Envelope
from quire.server.context import ServerContext
from quire.server.exchange import Exchange, off_loop
from quire.server.generation import Run, finish_reason
from quire.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from quire.server.requests import ChatCompletionRequest, RenderRequest, TokenizeRequest
from quire.server.responses import ChatChoice, ChatCompletion, ChatMessage, RenderedPrompt
from quire.server.sampling import chat_params, check_logprobs, make_ask
from quire.text.chat import ChatAsk
from quire.types import CompletionOutput, check_window


def chat_ask(
    body: ChatCompletionRequest | RenderRequest | TokenizeRequest, messages: list[dict[str, Any]]
) -> ChatAsk:
    """The conversation of a request."""
    opens = body.add_generation_prompt
    return ChatAsk(
        messages=messages,
        documents=getattr(body, "documents", None),
        add_generation_prompt=not body.continue_final_message if opens is None else opens,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
        reasoning_effort=getattr(body, "reasoning_effort", None),
    )


async def chat_completions(context: ServerContext, exchange: Exchange) -> None:
    """Answer a conversation, whole or as a stream."""
    card = context.card()
    read = await read_body(context, exchange, ChatCompletionRequest, fields.CHAT)
    body = read.value
    envelope = make_envelope(context, exchange, body, "chatcmpl")
    check_streaming(body)
    params = await off_loop(len(read.raw), lambda: chat_params(body, card.default_sampling))
    prompt = await context.engine.encode_chat(chat_ask(body, body.messages))
    asked = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    check_window(len(prompt), params.max_tokens, card.max_model_len, "messages", asked)
    check_logprobs(params, [len(prompt)], card.max_model_len, "top_logprobs")
    ask = make_ask(exchange, body, params, prompt, envelope.id)
    texts = TokenTexts(context.engine, as_ids=bool(body.return_tokens_as_token_ids))
    if not body.stream:
        run = await run_whole(context, exchange, [ask])

        def encode() -> bytes:
            answer = _answer(context, body, envelope, run, texts)
            if wants_timings(exchange, body):
                answer.timings = run.timings()
            return msgspec.json.encode(answer)

        await exchange.respond(200, await off_loop(run.answer_size(), encode))
        return
    chunks = Chunks(envelope, params.n, chat=True, usage=wants_usage(context, body))
    opened: set[int] = set()
    ids = bool(body.return_token_ids)

    def chunk_of(choice: int, delta: StreamDelta) -> bytes:
        if delta.logprobs is None and delta.finish_reason is None and not ids:
            data = chunks.text(choice, delta.text) if delta.text else b""
        else:
            logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, texts)
            data = chunks.full(choice, delta, logprobs, ids=ids)
        if choice not in opened:
            opened.add(choice)
            data = chunks.role(choice) + data
        return data

    await EventStream(context, exchange, body, chunks).write([ask], chunk_of)


def _answer(
    context: ServerContext, body: ChatCompletionRequest, envelope: Envelope, run: Run, texts: TokenTexts
) -> ChatCompletion:
    (output,) = run.outputs
    ids = bool(body.return_token_ids)
    positions = output.prompt_logprobs
    return ChatCompletion(
        id=envelope.id,
        created=envelope.created,
        model=envelope.model,
        system_fingerprint=envelope.system_fingerprint,
        choices=[_choice(sample, texts, ids=ids) for sample in output.outputs],
        usage=run.usage(),
        prompt_logprobs=optional(None if positions is None else prompt_logprobs(positions, context.engine)),
        prompt_token_ids=output.prompt_token_ids if ids else UNSET,
    )


def _choice(sample: CompletionOutput, texts: TokenTexts, *, ids: bool) -> ChatChoice:
    return ChatChoice(
        index=sample.index,
        message=ChatMessage(sample.text),
        logprobs=None if sample.logprobs is None else chat_logprobs(sample.logprobs, texts),
        finish_reason=finish_reason(sample.finish_reason),
        stop_reason=sample.stop_reason,
        token_ids=sample.token_ids if ids else UNSET,
    )


async def render(context: ServerContext, exchange: Exchange) -> None:
    """The prompt that a chat request would make, as text and as token ids."""
    card = context.card()
    body = (await read_body(context, exchange, RenderRequest, fields.RENDER)).value
    model = context.model(body.model)
    ask = chat_ask(body, body.messages)
    ids = await context.engine.encode_chat(ask)
    text = await context.engine.render_chat(ask)
    answer = RenderedPrompt(
        model=model, prompt=text, token_ids=ids, count=len(ids), max_model_len=card.max_model_len
    )
    await exchange.respond(200, msgspec.json.encode(answer))
