"""Response bodies as OpenAI's clients expect them. UNSET fields are left out."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Generated tokens that are reasoning, where a model reasons. Of a request's prediction: tokens that were tried and
    accepted, and those tried and rejected, which are not among the generated tokens.
    """

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class UsageBody(msgspec.Struct):
    """Token counts of a request; prompt tokens found in the prefix cache count as cached. A model that reasons, and a
    request with a prediction, have details of the completion. `speculation` is there if the answer depends on drafts.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    speculation: str | UnsetType = UNSET


class TimingsBody(msgspec.Struct):
    """Where the time of a request went, in seconds, and what became of drafts; the parts sum to total_seconds."""

    tokenize_seconds: float  # arrival of the headers to admission: body, JSON, template, tokens
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    deliver_seconds: float  # last token to the making of this object
    total_seconds: float
    # seconds by part of /v1/requests/{id}/explain, as far as the server knows them; from the first byte read
    parts: dict[str, float] | UnsetType = UNSET
    draft_n: int | UnsetType = UNSET  # drafts run over all samples, if any, as llama-server calls them
    draft_n_accepted: int | UnsetType = UNSET  # of them, those that were right


class PromptProgressBody(msgspec.Struct):
    """How many of the `total` tokens of a prompt are computed: `processed`, of which `cache` were found in the prefix
    cache, `time_ms` milliseconds after that began.
    """

    total: int
    cache: int
    processed: int
    time_ms: float


class TopLogprob(msgspec.Struct):
    """A likely token: its text, natural-log probability and bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobBody(msgspec.Struct):
    """A chosen token with the most likely ones at its position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Logprobs of a message."""

    content: list[TokenLogprobBody]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Logprobs of a completion in OpenAI's older form: parallel lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """A candidate at a prompt position, as vLLM reports it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
# What strict: false left out: the path of each keyword in the schema, and why.
Dropped = list[str]


class FunctionBody(msgspec.Struct):
    """A function that is called; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct):
    """A call of a function."""

    id: str
    function: FunctionBody
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """The assistant's answer. `content` is null if there are only calls or reasoning. `reasoning` repeats
    `reasoning_content` under its newer name.
    """

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    function_call: FunctionBody | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One sample of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    accepted_drafts: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer to a chat request that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET
    dropped_keywords: Dropped | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """One sample of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    accepted_drafts: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer to a completion request that is not streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody
    timings: TimingsBody | UnsetType = UNSET
    dropped_keywords: Dropped | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """The name of a called function, or the next piece of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A piece of the call number `index`; the first has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """The part that a chunk adds to a message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionDelta | None = None


class ChatChunkChoice(msgspec.Struct):
    """The part that a chunk adds to one sample."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    accepted_drafts: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One `data:` event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    timings: TimingsBody | UnsetType = UNSET
    prompt_progress: PromptProgressBody | UnsetType = UNSET
    dropped_keywords: Dropped | UnsetType = UNSET
