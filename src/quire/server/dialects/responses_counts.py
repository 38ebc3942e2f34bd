"""Routes of OpenAI's Responses that generate nothing: tokens of an input, and the compaction that is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from quire.server.answer_forms import tools_of
from quire.server.chat import chat_ask
from quire.server.context import ServerContext
from quire.server.dialects.asking import renamed
from quire.server.dialects.openai_responses import NAMES, chat_request, items_before
from quire.server.dialects.responses_input import chat_messages, input_items
from quire.server.dialects.responses_types import (
    REFUSED,
    RESPONSES_ERRORS,
    FunctionOffer,
    Items,
    ReasoningOptions,
    ResponsesRequest,
    TextOptions,
)
from quire.server.errors import ApiError, bad_request
from quire.server.exchange import Body, Exchange, off_loop
from quire.server.routes import Act, HttpRoute, Post
from quire.text.tools import MAX_TOOLS


class InputCountRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses/input_tokens: the fields of a response that its prompt is made of."""

    input: str | Items | None = None
    model: Annotated[str | None, Meta(description="a served name; default: the first")] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionOffer], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None


class InputCount(msgspec.Struct, kw_only=True):
    """Answer to POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


async def count(context: ServerContext, exchange: Exchange, read: Body[InputCountRequest]) -> InputCount:
    """Tokens of the prompt that a response would have. Raises ContextLengthError for one that does not fit."""
    context.card()
    given = read.value
    if given.input is None and given.previous_response_id is None:
        raise bad_request("input", "input: missing")
    with renamed(NAMES):
        context.model(given.model)
        fields = {name: getattr(given, name) for name in given.__struct_fields__ if name != "input"}
        body = ResponsesRequest(input=[] if given.input is None else given.input, **fields)
        before = await items_before(context, exchange, body.previous_response_id)
        messages = chat_messages([*before, *input_items(body.input)], body.instructions)
        asked = chat_request(context, body, messages)
        tools = await off_loop(read.size, lambda: tools_of(asked))
        return InputCount(
            input_tokens=len(await context.engine.encode_chat(chat_ask(asked, asked.messages, tools)))
        )


async def compact(_: ServerContext, exchange: Exchange) -> NoReturn:
    """Refuse to compact a conversation. Raises ApiError."""
    message = (
        f"{exchange.path}: not done by this server: a compaction is a summary that only its maker can read; prompts "
        "are never shortened here, and input_tokens counts one before it is sent"
    )
    raise ApiError(400, message, code="unsupported_route")


ROUTES: tuple[HttpRoute, ...] = (
    Post(
        path="/v1/responses/input_tokens", summary="Tokens of the prompt of a response", tag="responses",
        handler=count, request=InputCountRequest, response=InputCount,
        refused={**REFUSED, "personality": ()}, errors=RESPONSES_ERRORS,
    ),
    Act(
        verb="POST", path="/v1/responses/compact", summary="Refused: conversations are not shortened",
        tag="responses", handler=compact, response=dict, errors=RESPONSES_ERRORS,
    ),
)  # fmt: skip
