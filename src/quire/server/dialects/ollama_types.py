"""Bodies of Ollama's API: https://docs.ollama.com/api."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from quire.server.dialects.parameter_fields import parameter_struct
from quire.server.errors import ApiError, ErrorForm
from quire.server.fields import RefusedFields
from quire.server.pooled import TextOrTexts
from quire.server.requests import MAX_MESSAGES, Tools
from quire.server.responses import TokenLogprobBody
from quire.types import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, parameter_names

_StopText = Annotated[str, Meta(max_length=MAX_STOP_STRING_CHARS)]
_Images = Annotated[list[Any], Meta(max_length=0)]
_Form = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "string", "null"]})]


KeepAlive = Annotated[
    str | float | None,
    Meta(
        description="seconds, or a duration as 5m, that the model stays: with several models and --allow-keep-alive"
    ),
]

# Parameters by Ollama's name; -1 and -2 as num_predict are the rest of the context.
PARAMETER_OPTIONS = parameter_names("Ollama")
if TYPE_CHECKING:

    class _Parameters(msgspec.Struct, kw_only=True):
        """Numbers of SamplingParams."""

else:
    _Parameters = parameter_struct(PARAMETER_OPTIONS)


class OllamaOptions(_Parameters, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the answer. Those that configure a runner are options of the server, and refused here."""

    num_ctx: Annotated[int | None, Meta(description="context of this request; at most max_model_len")] = None
    stop: _StopText | Annotated[list[_StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    # Nothing is truncated, so all tokens are kept.
    num_keep: int | None = None
    # Values that ask for what happens anyway.
    tfs_z: float | None = None
    penalize_newline: bool | None = None


class OllamaFunction(msgspec.Struct):
    """A function that was called; `arguments` is an object."""

    name: str
    arguments: dict[str, Any] = {}
    index: int | UnsetType = UNSET


class OllamaCall(msgspec.Struct):
    """A call of a function."""

    function: OllamaFunction
    id: str | UnsetType = UNSET


class OllamaMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of a conversation, or of an answer."""

    role: str
    content: str = ""
    thinking: str | None = None
    images: _Images | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _OllamaRequest(msgspec.Struct, kw_only=True):
    """Fields that chat and generate share."""

    model: str | None = None
    stream: Annotated[bool | None, Meta(description="default true")] = None
    options: OllamaOptions | None = None
    format: Annotated[_Form, Meta(description='"json", or a JSON schema')] = UNSET
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: KeepAlive = None
    truncate: Annotated[bool | None, Meta(description="nothing is truncated; true is refused")] = None
    shift: Annotated[bool | None, Meta(description="the context does not move; true is refused")] = None
    logprobs: Annotated[bool | None, Meta(description="the log-probability of each token of the answer")] = (
        None
    )
    top_logprobs: Annotated[int | None, Meta(description="so many likely tokens with each of them")] = None


class OllamaChatRequest(_OllamaRequest, kw_only=True):
    """Body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(_OllamaRequest, kw_only=True):
    """Body of POST /api/generate."""

    prompt: str = ""
    suffix: Annotated[str | None, Meta(description="the text behind the answer, for code models")] = None
    system: str | None = None
    raw: Annotated[bool | None, Meta(description="continue the prompt without the template")] = None
    images: _Images | None = None


class OllamaDurations(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why an answer ended, where its time went in nanoseconds, and its tokens. The model is loaded before."""

    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatAnswer(OllamaDurations, kw_only=True):
    """Answer to POST /api/chat, or a line of its stream."""

    model: str
    created_at: str
    message: OllamaMessage
    done: bool
    logprobs: list[TokenLogprobBody] | None = None


class OllamaGenerateAnswer(OllamaDurations, kw_only=True):
    """Answer to POST /api/generate, or a line of its stream."""

    model: str
    created_at: str
    response: str
    done: bool
    thinking: str | None = None
    logprobs: list[TokenLogprobBody] | None = None


class OllamaVersion(msgspec.Struct):
    """The version of Quire."""

    version: str


class OllamaDetails(msgspec.Struct):
    """Facts about a model; what is not known is empty."""

    family: str
    families: list[str]
    format: str = ""
    parent_model: str = ""
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, kw_only=True):
    """A served model; `digest` is that of its configuration, `size` its share of the memory, or 0."""

    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: OllamaDetails
    context_length: int
    size_vram: int | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET  # when it leaves the memory


class OllamaModels(msgspec.Struct):
    """The served models."""

    models: list[OllamaModel]


_Options = Annotated[
    dict[str, Any] | None, Meta(description="nothing but null values: vectors have no parameters")
]


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """Body of POST /api/embed. A model without `input` is loaded."""

    model: str | None = None
    input: Annotated[TextOrTexts, Meta(description="a text, or a list of texts")] = ""
    truncate: Annotated[
        bool | None,
        Meta(description="true: cut longer texts to what the model takes; they are refused without it"),
    ] = None
    dimensions: Annotated[int | None, Meta(description="keep the first numbers of each vector")] = None
    keep_alive: KeepAlive = None
    options: _Options = None


class OllamaEmbedAnswer(msgspec.Struct, kw_only=True):
    """Vectors of length one, in the order of the texts; durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class OllamaEmbeddingRequest(msgspec.Struct, kw_only=True):
    """Body of POST /api/embeddings, the older form of /api/embed."""

    model: str | None = None
    prompt: str = ""
    keep_alive: KeepAlive = None
    options: _Options = None


class OllamaEmbeddingAnswer(msgspec.Struct):
    """The vector of a text, of the length that the model gives it."""

    embedding: list[float]


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """Body of POST /api/show; `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: Annotated[bool | None, Meta(description="there is nothing more to show")] = None


class OllamaShown(msgspec.Struct, kw_only=True):
    """Facts about a served model: its default parameters a line each, its chat template, and what it can do."""

    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaErrorBody(msgspec.Struct):
    """Body of an error response, and of the last line of a stream that failed."""

    error: str


def _error(_: ApiError, message: str, __: str | None) -> OllamaErrorBody:
    return OllamaErrorBody(message)


def _line(body: bytes) -> bytes:
    return body + b"\n"


OLLAMA_ERRORS = ErrorForm(_error, OllamaErrorBody, _line)
REFUSED: RefusedFields = {
    "context": ([],), "template": ("",), "width": (0,), "height": (0,), "steps": (0,),
}  # fmt: skip
