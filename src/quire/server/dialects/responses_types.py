"""Bodies of OpenAI's Responses API: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, UnsetType

from quire.server.errors import OPENAI_ERRORS, ErrorForm
from quire.server.fields import RefusedFields
from quire.server.requests import MAX_MESSAGES
from quire.text.tools import MAX_TOOLS

_Schema = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "boolean", "null"]})]
_ITEM = {
    "type": "object",
    "properties": {
        "type": {
            "enum": [
                "message",
                "function_call",
                "function_call_output",
                "reasoning",
                "mcp_list_tools",
                "mcp_call",
                "mcp_approval_request",
                "mcp_approval_response",
            ]
        },
        "role": {"enum": ["user", "assistant", "system", "developer"]},
    },
}
Items = Annotated[
    list[Annotated[dict[str, Any], Meta(extra_json_schema=_ITEM)]],
    Meta(min_length=1, max_length=MAX_MESSAGES),
]
MAX_METADATA = 16


class AnyTextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Any text."""


class ObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """A JSON object."""


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON of a schema; `strict` false enforces what can be enforced."""

    schema: _Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """The form of the text of an answer."""

    format: AnyTextFormat | ObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct):
    """The effort of reasoning: "none" turns it off, "medium" is what the model does by itself if its template reads no
    effort. There are no summaries.
    """

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None  # the older name
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class FunctionOffer(msgspec.Struct, tag_field="type", tag="function"):
    """A function that the client runs."""

    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Annotated[
        bool | None, Meta(description="all tools are in the prompt; true is refused")
    ] = None
    output_schema: Annotated[dict[str, Any], Meta(max_length=0)] | None = None
    asynchronous: Annotated[bool | None, Meta(description="true is refused")] = msgspec.field(
        default=None, name="async"
    )


class ToolFilter(msgspec.Struct):
    """Tools of a server: those with one of the names, and those that say of themselves that they only read, or not."""

    tool_names: list[str] | None = None
    read_only: bool | None = None

    def matches(self, name: str, annotations: Mapping[str, Any] | None) -> bool:
        """Whether a tool is one of them."""
        if self.tool_names is not None and name not in self.tool_names:
            return False
        reads = annotations is not None and annotations.get("readOnlyHint") is True
        return self.read_only is None or self.read_only is reads


class ApprovalFilter(msgspec.Struct):
    """Tools that run only when the client approves, and tools that run without. With `always` alone the others run
    without; a tool that neither names needs an approval.
    """

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpOffer(msgspec.Struct, tag_field="type", tag="mcp", kw_only=True):
    """Tools of a tool server that the operator named: by `server_url`, or else by `server_label`."""

    server_label: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
    server_url: str | None = None
    server_description: str | None = None
    allowed_tools: list[str] | ToolFilter | None = None
    require_approval: Annotated[
        Literal["always", "never"] | ApprovalFilter | None, Meta(description="default: always")
    ] = None
    allowed_callers: list[str] | None = None
    authorization: str | None = None
    connector_id: str | None = None
    tunnel_id: str | None = None
    defer_loading: bool | None = None
    headers: dict[str, str] | None = None

    def allows(self, name: str, annotations: Mapping[str, Any] | None) -> bool:
        """Whether the request lets the model call a tool."""
        if isinstance(self.allowed_tools, ToolFilter):
            return self.allowed_tools.matches(name, annotations)
        return self.allowed_tools is None or name in self.allowed_tools

    def needs_approval(self, name: str, annotations: Mapping[str, Any] | None) -> bool:
        """Whether a call waits for the approval of the client."""
        asked = self.require_approval
        if not isinstance(asked, ApprovalFilter):
            return asked != "never"
        if asked.never is not None and asked.never.matches(name, annotations):
            return False
        if asked.always is not None and asked.never is None:
            return asked.always.matches(name, annotations)
        return True


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses. null means the default for each field."""

    input: str | Items
    model: Annotated[str | None, Meta(description="a served name; default: the first")] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: Annotated[bool | None, Meta(description="keep the response; default true")] = None
    background: Annotated[bool | None, Meta(description="answer at once, and generate meanwhile")] = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: Annotated[int | None, Meta(description="calls of tool servers")] = None
    temperature: float | None = None
    service_tier: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    top_p: float | None = None
    tools: Annotated[list[FunctionOffer | McpOffer], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int | None, Meta(description="so many likely tokens with each of the text")] = (
        None
    )
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    user: str | None = None

    @property
    def scored(self) -> bool:
        """Whether the tokens of the text come with log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


class CachedInput(msgspec.Struct):
    """Tokens of the prompt that came from the prefix cache, and those that were added to it."""

    cached_tokens: int
    cache_write_tokens: int


class ReasonedOutput(msgspec.Struct):
    """Generated tokens that are reasoning."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: CachedInput
    output_tokens: int
    output_tokens_details: ReasonedOutput
    total_tokens: int


class ResponsesError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseBody(msgspec.Struct, kw_only=True):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["completed", "incomplete", "failed", "in_progress", "queued", "cancelled"]
    background: bool
    error: ResponsesError | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Any] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: str = "default"
    store: bool
    temperature: float | None
    text: Any
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int = 0
    top_p: float | None
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None


class ResponseEvent(msgspec.Struct):
    """One event of a streamed response; `type` is its name, and determines its other fields."""

    type: str
    sequence_number: int


class DeletedResponse(msgspec.Struct, kw_only=True):
    """Answer to DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItems(msgspec.Struct, kw_only=True):
    """Answer to GET /v1/responses/{id}/input_items."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _event(body: bytes) -> bytes:
    return b'event: error\ndata: {"type":"error",' + body[1:] + b"\n\n"


RESPONSES_ERRORS = ErrorForm(OPENAI_ERRORS.make, OPENAI_ERRORS.schema, _event)
# Labels and hints, which change neither the answer nor its cost: prefixes are always cached.
IGNORED = frozenset(("prompt_cache_key", "safety_identifier"))
REFUSED: RefusedFields = {
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}
