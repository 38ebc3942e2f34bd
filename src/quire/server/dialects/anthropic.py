"""Anthropic's POST /v1/messages and its count of tokens, translated to a chat request."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from quire.engine.api import GenerateAsk
from quire.server.answering import AnswerStream, StreamForm, answer_whole, generating_model
from quire.server.chat import chat_ask, prepare_chat
from quire.server.context import ServerContext
from quire.server.dialects.anthropic_answers import PING, MessageHead, MessageStream, message_pieces
from quire.server.dialects.anthropic_types import (
    ANTHROPIC_ERRORS,
    IGNORED,
    REFUSED,
    AnthropicMessage,
    CacheControl,
    ContentBlock,
    CountRequest,
    MessageEvent,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolOffer,
    ToolResultBlock,
    ToolUseBlock,
    TurnMessage,
)
from quire.server.dialects.asking import Renames, reasons, renamed, thinking_fields
from quire.server.dialects.blocks import BlockAnswer
from quire.server.errors import bad_request
from quire.server.exchange import Body, Exchange
from quire.server.requests import ChatCompletionRequest, JsonSchemaFormat, NamedSchema, PrefixRetention
from quire.server.routes import Post
from quire.text.tools import read_tools
from quire.types import RequestError

_NAMES: Renames = {
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    r"thinking_token_budget": "thinking.budget_tokens",
    r"reasoning_effort": "output_config.effort",
    r"stop\b": "stop_sequences",
}
_BILLING = "x-anthropic-billing-header:"


async def messages(context: ServerContext, exchange: Exchange, read: Body[MessagesRequest]) -> None:
    """Answer a conversation, whole or as a stream."""
    context.card()
    body = read.value
    model = generating_model(context, exchange, body.model).name
    head = MessageHead(f"msg_{uuid.uuid4().hex}", model, _cached_block(context, body))
    with renamed(_NAMES):
        asked = _chat_request(context, body)
        body.messages = []
        prepared = await prepare_chat(context, exchange, Body(read.size, asked), head.id)
        await _answer(context, exchange, prepared.ask, head, stream=bool(body.stream))


async def _answer(
    context: ServerContext, exchange: Exchange, ask: GenerateAsk, head: MessageHead, *, stream: bool
) -> None:
    if not stream:
        await answer_whole(context, exchange, [ask], partial(message_pieces, head), answers=BlockAnswer)
        return
    events = MessageStream(head)
    form = StreamForm(
        events.chunk_of, events.last, events.first, around=events.around if ask.reading is None else None,
        direct=events.direct, ping=PING,
    )  # fmt: skip
    await AnswerStream(context, exchange, form).write([ask])


async def count_tokens(context: ServerContext, exchange: Exchange, read: Body[CountRequest]) -> TokenCount:
    """Tokens of the prompt that a conversation makes."""
    context.card()
    body = read.value
    context.model(body.model, exchange)
    with renamed(_NAMES):
        asked = ChatCompletionRequest(**_conversation(context, body))
        ask = chat_ask(asked, asked.messages, read_tools(asked.tools))
        return TokenCount(len(await context.engine.encode_chat(ask)))


def _cached_block(context: ServerContext, body: CountRequest) -> int:
    """Tokens of a block of the prefix cache if the request has a cache_control, else 0."""
    return context.engine.card.cache_block if _marks(body) else 0


def _marks(body: CountRequest) -> list[CacheControl]:
    """Every cache_control of a request."""
    contents = [message.content for message in body.messages]
    blocks: list[Any] = [
        block for found in (*contents, body.system) if isinstance(found, list) for block in found
    ]
    marked = (body, *blocks, *(body.tools or ()))
    return [mark for one in marked if (mark := getattr(one, "cache_control", None)) is not None]


def _keeping(body: CountRequest) -> PrefixRetention | None:
    """How long the prompt is to be kept: the longest time that is asked for, for all of it."""
    marks = _marks(body)
    return (
        PrefixRetention("ephemeral", "1h" if any(mark.ttl == "1h" for mark in marks) else "5m")
        if marks
        else None
    )


def _chat_request(context: ServerContext, body: MessagesRequest) -> ChatCompletionRequest:
    """The same request inside. Raises ApiError or RequestError naming the field."""
    sampling = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
    form = _response_format(body)
    return ChatCompletionRequest(
        **_conversation(context, body),
        **sampling,
        stop=body.stop_sequences,
        response_format=form,
        cache_control=_keeping(body),
    )


def _response_format(body: CountRequest) -> JsonSchemaFormat | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    schema = msgspec.Raw(msgspec.json.encode(body.output_config.format.schema))
    return JsonSchemaFormat(NamedSchema(schema=schema))


def _conversation(context: ServerContext, body: CountRequest) -> dict[str, Any]:
    """Fields of a chat request: what the prompt depends on."""
    found: list[dict[str, Any]] = []
    if body.system and (system := _without_billing(body.system)):
        found.append({"role": "system", "content": _texts(system)})
    for index, message in enumerate(body.messages):
        found += _turn(f"messages[{index}]", message)
    fields: dict[str, Any] = {"messages": _joined(found), **_thinking(context, body), **_choice(body)}
    if body.messages[-1].role == "assistant":
        if "tool_calls" in found[-1]:
            field = f"messages[{len(body.messages) - 1}]"
            raise bad_request(field, f"{field}: a tool_use is answered by a tool_result")
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools)]
    return fields


def _without_billing(system: str | Sequence[TextBlock]) -> str | Sequence[TextBlock]:
    """Claude Code's first block is a header for Anthropic's bills. It differs in every request, so that no two prompts
    would share a prefix.
    """
    if isinstance(system, str) or not system[0].text.startswith(_BILLING):
        return system
    return system[1:]


def _texts(content: str | Sequence[TextBlock]) -> Any:
    return (
        content if isinstance(content, str) else [{"type": "text", "text": block.text} for block in content]
    )


def _turn(field: str, message: TurnMessage) -> Iterator[dict[str, Any]]:
    """A turn as messages of a chat: each result of a tool is one."""
    role, content = message.role, message.content
    if isinstance(content, str):
        yield {"role": role, "content": content}
    elif not content:
        raise bad_request(f"{field}.content", f"{field}.content: must not be empty")
    elif role == "assistant":
        yield _assistant(field, content)
    else:
        parts: list[dict[str, Any]] = []
        for index, block in enumerate(content):
            match block:
                case TextBlock(text=text):
                    parts.append({"type": "text", "text": text})
                case ToolResultBlock() if role == "user":
                    if parts:
                        yield {"role": role, "content": parts}
                        parts = []
                    yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
                case _:
                    raise _misplaced(f"{field}.content[{index}]", block, role)
        if parts:
            yield {"role": role, "content": parts}


def _assistant(field: str, content: Sequence[ContentBlock]) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(content):
        match block:
            case TextBlock(text=text):
                texts.append({"type": "text", "text": text})
            case ThinkingBlock(thinking=thought):
                thoughts.append(thought)
            case ToolUseBlock(id=name):
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": name, "type": "function", "function": function})
            case _:
                raise _misplaced(f"{field}.content[{index}]", block, "assistant")
    made: dict[str, Any] = {"role": "assistant", "content": texts or ("" if not calls else None)}
    if calls:
        made["tool_calls"] = calls
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    return made


def _misplaced(field: str, block: ContentBlock, role: str) -> Exception:
    kind = type(block).__struct_config__.tag
    return bad_request(field, f"{field}: a block of type {kind} does not belong to the role {role}")


def _result(block: ToolResultBlock) -> Any:
    content = "" if block.content is None else _texts(block.content)
    if not block.is_error:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [{"type": "text", "text": "Error: "}, *content]


def _joined(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns of one role in a row become one, as with Anthropic; calls and their results stay as they are."""
    joined: list[dict[str, Any]] = []
    for message in found:
        last: dict[str, Any] = joined[-1] if joined else {"role": None}
        if last["role"] == message["role"] == "user":
            last["content"] = [*_parts(last["content"]), *_parts(message["content"])]
        else:
            joined.append(message)
    return joined


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _tool(field: str, tool: ToolOffer) -> dict[str, Any]:
    if tool.defer_loading:
        raise bad_request(
            f"{field}.defer_loading", f"{field}.defer_loading: not supported; all tools are in the prompt",
            "unsupported_parameter",
        )  # fmt: skip
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(body: CountRequest) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice.name", "tool_choice.name: missing; it names the tool to be called")
        named: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        named = {"any": "required"}.get(choice.type, choice.type)
    return {"tool_choice": named, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(context: ServerContext, body: CountRequest) -> dict[str, Any]:
    """Fields that turn thinking on or off; without any, what the model does by itself. A budget is a limit: a model
    that does not reason keeps any.
    """
    effort = None if body.output_config is None else body.output_config.effort
    fields = {} if effort is None else thinking_fields(context, effort, "output_config.effort")
    config = body.thinking
    if config is None:
        return fields
    if config.type != "enabled" and config.budget_tokens is not None:
        raise RequestError("thinking.budget_tokens", f"needs the type enabled, not {config.type}")
    reasoning = reasons(context)
    if config.type == "disabled" or reasoning:
        fields |= thinking_fields(context, config.type != "disabled", "thinking")
    if config.budget_tokens is not None:
        most = getattr(body, "max_tokens", None)
        if most is not None and config.budget_tokens >= most:
            raise RequestError(
                "thinking.budget_tokens", f"{config.budget_tokens} is not below max_tokens {most}"
            )
        fields |= {"thinking_token_budget": config.budget_tokens} if reasoning else {}
    elif config.type == "enabled":
        raise RequestError("thinking.budget_tokens", "missing; the type enabled needs it")
    return fields


ROUTES = (
    Post(
        path="/v1/messages", summary="Answer a conversation, in Anthropic's form", tag="anthropic",
        handler=messages, request=MessagesRequest, response=AnthropicMessage, chunk=MessageEvent,
        refused=REFUSED, ignored=IGNORED, api="anthropic", errors=ANTHROPIC_ERRORS,
    ),
    Post(
        path="/v1/messages/count_tokens", summary="Tokens of a conversation, in Anthropic's form",
        tag="anthropic", handler=count_tokens, request=CountRequest, response=TokenCount, refused=REFUSED,
        ignored=IGNORED, api="anthropic", errors=ANTHROPIC_ERRORS,
    ),
)  # fmt: skip
