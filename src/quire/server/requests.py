"""Request bodies: OpenAI's fields and vLLM's extras. The OpenAPI document is generated from these types.

Fields listed here have an effect; fields of other servers without one are in `fields`. The numbers and switches of
SamplingParams become fields automatically, with their ranges in OpenAPI; SamplingParams checks the values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from quire.core.beam_search import MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY
from quire.parameters import Parameter
from quire.routing.tickets import MOST_TICKET
from quire.structured.ask import MAX_CHOICES
from quire.text.tools import MAX_NAME_CHARS, MAX_TOOLS
from quire.types import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BREAKERS,
    MAX_NAMED_TEXT_CHARS,
    MAX_NAMED_TOKENS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    PARAMETERS,
    SAMPLERS,
)

MAX_TOP_LOGPROBS = 20
# Lengths are limited where a body is decoded, so that no later code walks a list that will be refused.
MAX_MESSAGES = 2**14
MAX_DOCUMENTS = 2**12
MAX_TEMPLATE_VARIABLES = 256
MAX_IDS = 2**20
MAX_SALT_CHARS = MAX_SESSION_CHARS = 256
MAX_SCALED = 64  # adapters of a request

IdList = Annotated[list[int], Meta(max_length=MAX_IDS)]
_TOKEN = {"type": "integer", "minimum": 0}
_ALIKE = ({"type": "string", "minLength": 1}, _TOKEN, {"type": "array", "items": _TOKEN, "minItems": 1})
Prompt = (
    Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    | Annotated[
        list[str | int | list[int]],
        Meta(
            max_length=MAX_IDS,
            extra_json_schema={"minItems": 1, "anyOf": [{"items": kind} for kind in _ALIKE]},
        ),
    ]
)
_NamedIds = Annotated[list[int], Meta(max_length=MAX_NAMED_TOKENS)]
_StopText = Annotated[str, Meta(max_length=MAX_STOP_STRING_CHARS)]
_StopTexts = Annotated[list[_StopText], Meta(max_length=MAX_STOP_STRINGS)]
_NamedText = Annotated[str, Meta(max_length=MAX_NAMED_TEXT_CHARS)]
_Biases = Annotated[dict[str, float], Meta(max_length=MAX_NAMED_TOKENS)]
_PART = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "thinking"]},
        "text": {"type": "string"},
        "thinking": {"type": ["string", "array"], "description": "reasoning, or text parts of it"},
    },
}
_MESSAGE = {
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "minLength": 1, "maxLength": 128,
                 "description": "system, user, assistant, tool, or another role of the model's template"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}],
                    "description": "null only for an assistant message with tool calls"},
    },
}  # fmt: skip
Messages = Annotated[
    list[Annotated[dict[str, Any], Meta(extra_json_schema=_MESSAGE)]],
    Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1}),
]
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
        "description": {"type": "string"},
        "parameters": {"type": "object", "description": "JSON schema of the arguments"},
        "strict": {"type": ["boolean", "null"]},
    },
}
_TOOL = {
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
}
Tools = Annotated[list[Annotated[dict[str, Any], Meta(extra_json_schema=_TOOL)]], Meta(max_length=MAX_TOOLS)]
Functions = Annotated[
    list[Annotated[dict[str, Any], Meta(extra_json_schema=_FUNCTION)]], Meta(max_length=MAX_TOOLS)
]
Documents = Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)]
Variables = Annotated[dict[str, Any], Meta(max_length=MAX_TEMPLATE_VARIABLES)]


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="vLLM: every chunk has the usage so far; needs include_usage")
    ] = None
    include_obfuscation: Annotated[
        bool | None, Meta(description="events are not padded; true is refused")
    ] = None


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of a text."""

    text: str


class Prediction(msgspec.Struct, tag_field="type", tag="content"):
    """A predicted output: text that the answer may turn out to be."""

    content: str | Annotated[list[TextPart], Meta(max_length=MAX_MESSAGES)]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


# JSON as it was sent: a schema, or a value of several types. UNSET where it was left out.
_Schema = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "boolean", "null"]})]
_SchemaOrText = Annotated[
    Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "boolean", "string", "null"]})
]
_Object = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "null"]})]
_Objects = Annotated[
    Raw | UnsetType, Meta(extra_json_schema={"type": ["array", "null"], "items": {"type": "object"}})
]
_TagText = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "string", "null"]})]
_Choices = Annotated[list[str], Meta(max_length=MAX_CHOICES)]
_LENIENT = "false: enforce what can be enforced, and list the rest in dropped_keywords of the answer"


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """A JSON object, of a schema if there is one."""

    schema: _Schema = UNSET


class NamedSchema(msgspec.Struct, kw_only=True):
    """A JSON schema as OpenAI sends it."""

    schema: _Schema
    name: str | None = None
    description: str | None = None
    strict: Annotated[bool | None, Meta(description=_LENIENT)] = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON of a schema."""

    json_schema: NamedSchema


class StructuralTagFormat(msgspec.Struct, tag_field="type", tag="structural_tag"):
    """Text with tags around structured parts: `format`, or the older `structures` and `triggers`."""

    format: _Object = UNSET
    structures: _Objects = UNSET
    triggers: Annotated[list[str], Meta(max_length=MAX_CHOICES)] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's description of an answer: one of the first six fields."""

    json: Annotated[_SchemaOrText, Meta(description="a JSON schema, or its text")] = UNSET
    regex: str | None = None
    choice: _Choices | None = None
    grammar: Annotated[str | None, Meta(description="GBNF or Lark")] = None
    json_object: bool | None = None
    structural_tag: _TagText = UNSET
    disable_any_whitespace: Annotated[
        bool | None, Meta(description="JSON without spaces and line breaks")
    ] = None
    disable_additional_properties: Annotated[
        bool | None, Meta(description="not supported; the schema says it with additionalProperties")
    ] = None
    whitespace_pattern: Annotated[
        str | None, Meta(description="regular expression of the space between the parts of JSON")
    ] = None
    disable_fallback: Annotated[bool | None, Meta(description="accepted; there is one engine")] = None


SCALARS = {name: known for name, known in PARAMETERS.items() if known.kind in {int, float, bool}}


def _known(name: str) -> Meta:
    """The description of a parameter in OpenAPI."""
    return Meta(description=PARAMETERS[name].help)


def _bounds(known: Parameter) -> Meta:
    """The range of a number in OpenAPI, equal to the check of its value later."""
    least = "exclusiveMinimum" if known.above else "minimum"
    return Meta(extra_json_schema={} if known.kind is bool else {least: known.low, "maximum": known.high})


def _optional(name: str) -> Any:
    return Annotated[Annotated[SCALARS[name].kind, _bounds(SCALARS[name])] | None, _known(name)]


if TYPE_CHECKING:

    class _Sampling(msgspec.Struct, kw_only=True):
        """Numbers and switches of SamplingParams; listed here are those that the server reads by name."""

        n: int | None = None
        temperature: float | None = None
        max_tokens: int | None = None
        prompt_logprobs: int | None = None

else:
    _Sampling = msgspec.defstruct(
        "_Sampling", [(name, _optional(name), None) for name in SCALARS], kw_only=True
    )


class ScaledAdapter(msgspec.Struct):
    """An adapter by its number in /lora-adapters."""

    id: int
    scale: float


ScaledAdapters = Annotated[
    Annotated[list[ScaledAdapter], Meta(max_length=MAX_SCALED)] | None,
    Meta(description="llama-server: adapters by number in /lora-adapters, with scales"),
]


class PrefixRetention(msgspec.Struct):
    """How long a prefix is to be kept, as Anthropic's API and OpenRouter say it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class KvTransferParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a router asks of the server that computes a prompt and of the one that answers; vLLM's names. No addresses:
    they are configured.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_request_id: Annotated[
        Annotated[str, Meta(max_length=MOST_TICKET)] | None, Meta(description="a ticket")
    ] = None
    remote_engine_id: None = None
    remote_block_ids: None = None
    remote_host: None = None
    remote_port: None = None


class ResumedOutput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a router has of an output: see quire.routing.continued."""

    ids: str
    mark: Annotated[str, Meta(max_length=MOST_TICKET)]
    code: Annotated[str, Meta(max_length=MOST_TICKET)]


class GenerationRequest(_Sampling, kw_only=True):
    """Fields that chat and completions share. null means the default for each of them."""

    model: Annotated[str | None, Meta(description="a served name; default: the first")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # OpenAI
    stop: Annotated[_StopText | _StopTexts | None, _known("stop")] = None
    logit_bias: Annotated[_Biases | None, _known("logit_bias")] = None
    prediction: Annotated[
        Prediction | None,
        Meta(description="a predicted output: it makes an answer like it faster, and no other"),
    ] = None
    # transformers, text-generation-webui
    negative_prompt: Annotated[
        str | None,
        Meta(
            description="what guidance_scale keeps the answer away from; default: the last token of the prompt"
        ),
    ] = None
    negative_prompt_ids: Annotated[list[int] | None, Meta(description="the same as token ids")] = None
    # vLLM
    stop_token_ids: Annotated[_NamedIds | None, _known("stop_token_ids")] = None
    allowed_token_ids: Annotated[
        Annotated[list[int], Meta(max_length=MAX_ALLOWED_TOKENS)] | None, _known("allowed_token_ids")
    ] = None
    banned_token_ids: Annotated[_NamedIds | None, _known("banned_token_ids")] = None
    bad_words: Annotated[
        Annotated[list[_NamedText], Meta(max_length=MAX_BAD_WORDS)] | None, _known("bad_words")
    ] = None
    # llama-server
    samplers: Annotated[
        Annotated[
            list[Annotated[str, Meta(extra_json_schema={"enum": [*SAMPLERS]})]],
            Meta(max_length=len(SAMPLERS)),
        ]
        | None,
        _known("samplers"),
    ] = None
    dry_sequence_breakers: Annotated[
        Annotated[list[_NamedText], Meta(max_length=MAX_BREAKERS)] | None, _known("dry_sequence_breakers")
    ] = None
    # vLLM
    kv_transfer_params: Annotated[
        KvTransferParams | None,
        Meta(description="from a router that has the servers' key; {} for all others"),
    ] = None
    # Quire
    resumed_output: Annotated[
        ResumedOutput | None, Meta(description="from a router that has the server's key")
    ] = None
    # vLLM
    return_token_ids: bool | None = None
    return_accepted_drafts: Annotated[
        bool | None, Meta(description="Quire's: name the tokens that were accepted drafts")
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Meta(description="write tokens in logprobs as token_id:N")
    ] = None
    priority: Annotated[
        int | None, Meta(description="lower values run earlier; needs --scheduling-policy priority")
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None,
        Meta(description="the prefix cache is shared only between equal salts"),
    ] = None
    request_id: Annotated[str | None, Meta(description="becomes part of the response's id")] = None
    use_beam_search: Annotated[bool | None, Meta(description="find the likeliest answers by beam search")] = (
        None
    )
    beam_width: Annotated[
        Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": MAX_BEAM_WIDTH})] | None,
        Meta(description="sequences that a beam search follows; default: best_of, else n"),
    ] = None
    length_penalty: Annotated[
        Annotated[
            float, Meta(extra_json_schema={"minimum": -MAX_LENGTH_PENALTY, "maximum": MAX_LENGTH_PENALTY})
        ]
        | None,
        Meta(description="a beam's score is its log-probability / length ** length_penalty; default 1"),
    ] = None
    early_stopping: Annotated[
        bool | Literal["never"] | None,
        Meta(description="when a beam search ends: true as soon as all beams have finished; default false"),
    ] = None
    # structured output, as several servers call it; see server/structured
    response_format: Annotated[ResponseFormat | None, Meta(description="what the answer must look like")] = (
        None
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[_SchemaOrText, Meta(description="structured_outputs.json")] = UNSET
    guided_regex: Annotated[str | None, Meta(description="structured_outputs.regex")] = None
    guided_choice: Annotated[_Choices | None, Meta(description="structured_outputs.choice")] = None
    guided_grammar: Annotated[str | None, Meta(description="structured_outputs.grammar")] = None
    guided_json_object: Annotated[bool | None, Meta(description="structured_outputs.json_object")] = None
    guided_whitespace_pattern: Annotated[
        str | None, Meta(description="structured_outputs.whitespace_pattern")
    ] = None
    grammar: Annotated[str | None, Meta(description="llama-server: a grammar in GBNF")] = None
    json_schema: Annotated[_Schema, Meta(description="llama-server: a JSON schema")] = UNSET
    format: Annotated[_TagText, Meta(description='Ollama: "json", or a JSON schema')] = UNSET
    # Quire
    deadline_ms: Annotated[
        float | None,
        Meta(description="end with 504 unless finished within this many milliseconds of arrival"),
    ] = None
    max_queue_ms: Annotated[
        float | None, Meta(description="end with 504 unless started within this many milliseconds of arrival")
    ] = None
    service_tier: Annotated[
        str | None, Meta(description="class of service: a name of --slo, auto, default, priority or flex")
    ] = None
    max_cost: Annotated[
        float | None,
        Meta(description="the most that a sample may cost: 1 for a token of the prompt, 2 for one generated"),
    ] = None
    session_id: Annotated[
        Annotated[str, Meta(max_length=MAX_SESSION_CHARS)] | None,
        Meta(description="a conversation: what it computed is kept for its next turn"),
    ] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "in-memory", "24h"] | None, Meta(description="24h: keep the prefix for a day")
    ] = None
    cache_control: Annotated[
        PrefixRetention | None, Meta(description="keep the prefix for 5 minutes, or for its ttl: 5m or 1h")
    ] = None
    timings: Annotated[
        bool | None, Meta(description="report where the time went; also x-quire-timings: 1")
    ] = None
    # llama-server
    lora: ScaledAdapters = None
    return_progress: Annotated[
        bool | None, Meta(description="a stream begins with how much of the prompt is computed")
    ] = None
    sse_ping_interval: Annotated[
        float | None,
        Meta(description="seconds without text after which a stream has a comment; -1 or 0: never"),
    ] = None


_Length = Annotated[int, _bounds(PARAMETERS["max_tokens"])]
_Logprobs = Annotated[int, _bounds(PARAMETERS["logprobs"])]
_TopLogprobs = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_TOP_LOGPROBS})]


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[_Length | None, Meta(description="new name of max_tokens")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[_TopLogprobs | None, Meta(description="requires logprobs")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Documents | None = None
    chat_template_kwargs: Annotated[
        Variables | None, Meta(description="variables that the model's template reads")
    ] = None
    reasoning_effort: Annotated[str | None, Meta(description="passed to templates that read it")] = None
    tools: Annotated[Tools | None, Meta(description="functions that the model may call")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(description="auto, none, required, one function by name, or allowed_tools"),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="whether an answer may have several calls; default true")
    ] = None
    functions: Annotated[Functions | None, Meta(description="the older form of tools")] = None
    function_call: Annotated[
        str | dict[str, Any] | None, Meta(description="the older form of tool_choice")
    ] = None
    include_reasoning: Annotated[
        bool | None, Meta(description="whether the answer shows its reasoning; default true")
    ] = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[Prompt | None, Meta(description="text, token ids, or a list of either")] = None
    prompt_embeds: Annotated[
        str | list[str] | None,
        Meta(
            description="in place of a prompt: its embeddings [tokens, hidden size] as safetensors in base64, or a list"
        ),
    ] = None
    max_tokens: Annotated[
        _Length | None, Meta(description=f"{PARAMETERS['max_tokens'].help}; default 16")
    ] = None
    logprobs: Annotated[_Logprobs | None, _known("logprobs")] = None
    echo: Annotated[bool | None, Meta(description="return the prompt before the completion")] = None
    suffix: Annotated[
        str | None,
        Meta(description="text behind the completion, for models with tokens to fill in the middle"),
    ] = None
    best_of: Annotated[
        int | None, Meta(description="samples of each prompt, of which the n most probable are returned")
    ] = None
    add_special_tokens: Annotated[bool | None, Meta(description="what the tokenizer adds around a text")] = (
        None
    )
