"""Bodies of Anthropic's Messages API: https://docs.claude.com/en/api/messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.server.errors import ApiError, ErrorForm
from quire.server.fields import RefusedFields
from quire.server.requests import MAX_MESSAGES
from quire.text.tools import MAX_NAME_CHARS, MAX_TOOLS
from quire.types import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS

_StopText = Annotated[str, Meta(max_length=MAX_STOP_STRING_CHARS)]


class CacheControl(msgspec.Struct):
    """Asks to cache the prompt up to here. Prefixes are always cached; the usage then says what was added."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """A text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class CallerBlock(msgspec.Struct):
    """Where a call came from: the model."""

    type: Literal["direct"]


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning. `signature` is a digest of it; one that comes back is not checked."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: CallerBlock | None = None
    toolset_name: Annotated[str, Meta(max_length=0)] | None = None


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """The result of a call; the model reads "Error: " before one that is an error."""

    tool_use_id: str
    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_MESSAGES)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Annotated[str, Meta(max_length=0)] | None = None


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class TurnMessage(msgspec.Struct):
    """A turn. A conversation that ends with an assistant's turn lets the model continue it."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_MESSAGES)]


class ToolOffer(msgspec.Struct):
    """A tool that the client runs."""

    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    input_schema: dict[str, Any] = {}
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Annotated[
        bool | None, Meta(description="inputs are always streamed as they arrive")
    ] = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: bool | None = None
    input_examples: Annotated[list[Any], Meta(max_length=0)] | None = None


class ToolChoiceBody(msgspec.Struct):
    """Whether the answer may, must or must not call tools; `name` of one that it must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    """Whether the model reasons, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized"] | None = None


class OutputSchema(msgspec.Struct):
    """A JSON schema of the text of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """The form of the answer, and the effort of its reasoning."""

    format: OutputSchema | None = None
    effort: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens: a conversation."""

    messages: Annotated[list[TurnMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Annotated[str | None, Meta(description="a served name; default: the first")] = None
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ToolOffer], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[_StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class TokenCount(msgspec.Struct):
    """Answer to POST /v1/messages/count_tokens."""

    input_tokens: int


class ThoughtTokens(msgspec.Struct):
    """Generated tokens that are thinking."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts. The prompt has `input_tokens` and both counts of the cache: tokens that were read from it, and, if
    the request has a cache_control, tokens that were added to it.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThoughtTokens | UnsetType = UNSET


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """Answer to POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"] | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageEvent(msgspec.Struct):
    """One event of a streamed message; `type` is its name, and determines its other fields."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "ping", "error",
    ]  # fmt: skip


class AnthropicError(msgspec.Struct):
    """What went wrong, in Anthropic's classes."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct):
    """Body of an error response, and of an error event."""

    error: AnthropicError
    type: Literal["error"] = "error"


_CLASSES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def _error(error: ApiError, message: str, _: str | None) -> AnthropicErrorBody:
    default = "invalid_request_error" if error.status < 500 else "api_error"
    return AnthropicErrorBody(AnthropicError(_CLASSES.get(error.status, default), message))


def _error_event(body: bytes) -> bytes:
    return b"event: error\ndata: " + body + b"\n\n"


ANTHROPIC_ERRORS = ErrorForm(_error, AnthropicErrorBody, _error_event, b"request-id")

# Labels, which change neither the answer nor its cost.
IGNORED = frozenset(("metadata", "user_profile_id", "workspace_id"))
_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
REFUSED: RefusedFields = {
    "container": (),
    "context_management": ({}, {"edits": []}, _KEEP_ALL),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
