"""POST /v1/chat/completions and its rendering."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.context_window import check_window
from quire.engine.api import GenerateAsk
from quire.server import fields, pieces
from quire.server.answer_forms import tools_of, with_form
from quire.server.answering import (
    AnswerStream,
    StreamForm,
    answer_whole,
    check_streaming,
    envelope_fields,
    make_envelope,
    openai_end,
    ping_seconds,
    wants_timings,
    wants_usage,
    with_running_usage,
)
from quire.server.assistant import ChatEvents, MessageForm, choice_pieces
from quire.server.chunks import Chunks, Envelope
from quire.server.context import ServerContext
from quire.server.continuing import with_continuation
from quire.server.draft_marks import marks_of
from quire.server.errors import bad_request
from quire.server.exchange import Body, Exchange, off_loop
from quire.server.generation import HttpGeneration
from quire.server.logprob_bodies import TokenTexts, prompt_pieces
from quire.server.requests import ChatCompletionRequest, Documents, Messages, Tools, Variables
from quire.server.responses import ChatCompletion, ChatCompletionChunk
from quire.server.routes import Post
from quire.server.sampling import chat_params, check_logprobs, make_ask, predicted, with_negative
from quire.server.scaled_adapters import served_with
from quire.server.structured import find_structure, with_grammar
from quire.server.transfers import answer_prefill, is_prefill
from quire.text.chat_renderer import ChatAsk
from quire.text.infill import InfillAsk
from quire.text.tools import ToolUse, read_tools
from quire.types import TokenIds


class RenderRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/chat/completions/render: the conversation of a chat request."""

    messages: Messages
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Documents | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: str | None = None
    tools: Tools | None = None


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """A conversation as the model sees it."""

    model: str
    prompt: str
    token_ids: list[int]
    count: int
    max_model_len: int


class _Conversation(Protocol):
    """The fields of a request that determine how its messages are rendered."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def chat_ask(body: _Conversation, messages: list[dict[str, Any]], tools: ToolUse | None = None) -> ChatAsk:
    """The conversation of a request. Raises ApiError for messages with more than text, reasoning and calls."""
    for position, message in enumerate(messages):
        for name in ("audio", "refusal"):
            if message.get(name) is not None:
                path = f"messages[{position}].{name}"
                raise bad_request(path, f"{path}: not supported; text only", "unsupported_parameter")
    opens = body.add_generation_prompt
    return ChatAsk(
        messages=messages,
        tools=None if tools is None else tools.rendered,
        documents=getattr(body, "documents", None),
        add_generation_prompt=not body.continue_final_message if opens is None else opens,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs or {},
        reasoning_effort=getattr(body, "reasoning_effort", None),
    )


def texts_of(context: ServerContext, body: ChatCompletionRequest) -> TokenTexts:
    """How tokens are spelled in logprobs."""
    return context.texts_as_ids if body.return_tokens_as_token_ids else context.texts


class PreparedChat(NamedTuple):
    """A conversation ready for admission, the tools that its answer may call, and the keywords of lenient schemas that
    are not enforced.
    """

    ask: GenerateAsk
    tools: ToolUse | None
    dropped: tuple[str, ...]


async def prepare_chat(
    context: ServerContext,
    exchange: Exchange,
    read: Body[ChatCompletionRequest],
    request_id: str,
    *,
    window: int | None = None,
    raw: str | InfillAsk | None = None,
) -> PreparedChat:
    """Check a conversation, render it, and compile the grammar of its answer. It must fit in a context of `window`
    tokens, by default the model's. A `raw` prompt, or the texts around what is to be filled in, take the place of the
    conversation, and are continued by one text. Raises ApiError or RequestError naming the field.
    """
    card, body = context.card(), read.value
    params = await off_loop(read.size, lambda: chat_params(body, card.default_sampling))
    tools = await off_loop(read.size, lambda: tools_of(body))
    structure = await off_loop(read.size, lambda: find_structure(body))
    if raw is None:
        prompt = TokenIds(await context.engine.encode_chat(chat_ask(body, body.messages, tools)))
    elif isinstance(raw, InfillAsk):
        made = await context.engine.encode_infill(raw)
        prompt, ends = TokenIds(made.token_ids), made.stop_ids
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
    elif not (prompt := TokenIds(await context.engine.encode(raw))):
        raise bad_request("prompt", "prompt: has no tokens")
    body.messages = []
    asked = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    check_window(
        len(prompt),
        params.max_tokens,
        window or card.max_model_len,
        "messages" if raw is None else "prompt",
        asked,
    )
    check_logprobs(params, [len(prompt)], card.max_model_len, "top_logprobs")
    if window is not None and params.max_tokens is None:
        params = replace(params, max_tokens=window - len(prompt))
    prediction = await predicted(context, body)
    texts = await context.engine.text_tokens(params) if params.has_texts else None
    ask = make_ask(context, exchange, body, params, prompt, request_id, prediction, texts)
    if is_prefill(body):
        return PreparedChat(ask, tools, ())
    (ask,) = await with_negative(context, body, [ask])
    if raw is None:
        ask, dropped = await with_form(context, exchange, ask, tools, structure)
    elif structure is None:
        dropped = ()
    else:
        (ask,), dropped = await with_grammar(context, exchange, [ask], structure)
    return PreparedChat(ask, tools, dropped)


async def chat_completions(
    context: ServerContext, exchange: Exchange, read: Body[ChatCompletionRequest]
) -> None:
    """Answer a conversation, whole or as a stream."""
    body = read.value
    served = await served_with(context, exchange, body.model, body.lora)
    envelope = make_envelope(context, served, body, "chatcmpl")
    check_streaming(body)
    ask, tools, dropped = await prepare_chat(context, exchange, read, envelope.id)
    if is_prefill(body):
        await answer_prefill(context, exchange, [ask])
        return
    form = MessageForm(reasoning=body.include_reasoning is not False, older=bool(tools and tools.older))
    if not body.stream:
        timings = wants_timings(exchange, body)

        def pieces_of(run: HttpGeneration) -> Iterator[bytes]:
            return _answer(context, body, envelope, run, form, ask, timings=timings, dropped=dropped)

        await answer_whole(context, exchange, [ask], pieces_of, logprobs="top_logprobs")
        return
    chunks = Chunks(
        envelope, ask.request.params.n, chat=True, usage=wants_usage(context, body), dropped=dropped
    )
    ids, marks = bool(body.return_token_ids), marks_of([ask])
    events = ChatEvents(chunks, texts_of(context, body), form, ids=ids, marks=marks)
    ended = openai_end(context, exchange, body, chunks)
    shape = StreamForm(
        events.chunk_of, ended, around=chunks.around, direct=events.direct,
        whole=ids or marks is not None, progress=chunks.progress,
    )  # fmt: skip
    shape = with_running_usage(context, body, shape)
    asks, shape = with_continuation(context, exchange, body, [ask], shape)
    await AnswerStream(
        context, exchange, shape, logprobs="top_logprobs", ping_seconds=ping_seconds(body)
    ).write(asks)


def _answer(
    context: ServerContext,
    body: ChatCompletionRequest,
    envelope: Envelope,
    run: HttpGeneration,
    form: MessageForm,
    ask: GenerateAsk,
    *,
    timings: bool,
    dropped: Sequence[str],
) -> Iterator[bytes]:
    """The JSON of a responses.ChatCompletion."""
    (output,) = run.outputs
    ids, texts = bool(body.return_token_ids), texts_of(context, body)
    rest: list[tuple[str, pieces.Pieces]] = [("usage", pieces.value(run.usage()))]
    if output.prompt_logprobs is not None:
        positions = run.prompt_logprobs(0), run.unscored(0)
        rest.append(("prompt_logprobs", prompt_pieces(*positions, context.engine)))
    if ids:
        rest.append(("prompt_token_ids", pieces.numbers(ask.request.prompt_token_ids)))
    if timings:
        rest.append(("timings", pieces.value(run.timings())))
    if dropped:
        rest.append(("dropped_keywords", pieces.value(dropped)))
    samples = zip(output.outputs, run.answers, strict=True)
    marks = marks_of([ask])
    choices = pieces.items(choice_pieces(*sample, form, texts, ids=ids, marks=marks) for sample in samples)
    return pieces.fields([*envelope_fields(envelope), ("choices", choices), *rest])


async def render(context: ServerContext, exchange: Exchange, read: Body[RenderRequest]) -> RenderedPrompt:
    """The prompt that a chat request would make, as text and as token ids."""
    card, body = context.card(), read.value
    model = context.model(body.model, exchange)
    ask = chat_ask(body, body.messages, read_tools(body.tools))
    ids = await context.engine.encode_chat(ask)
    text = await context.engine.render_chat(ask)
    return RenderedPrompt(
        model=model, prompt=text, token_ids=ids, count=len(ids), max_model_len=card.max_model_len
    )


ROUTES = (
    Post(
        path="/v1/chat/completions", summary="Answer a conversation", tag="generation", handler=chat_completions,
        request=ChatCompletionRequest, response=ChatCompletion, chunk=ChatCompletionChunk, refused=fields.CHAT,
    ),
    Post(
        path="/v1/chat/completions/render", summary="A conversation as the model reads it", tag="tokens",
        handler=render, request=RenderRequest, response=RenderedPrompt, refused=fields.CONVERSATION,
    ),
)  # fmt: skip
