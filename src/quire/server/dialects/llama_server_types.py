"""Bodies of llama-server's own API: https://github.com/ggml-org/llama.cpp/tree/master/tools/server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from quire.server.dialects.parameter_fields import parameter_struct
from quire.server.errors import ApiError, ErrorForm, event_of
from quire.server.fields import RefusedFields
from quire.server.requests import MAX_IDS, ScaledAdapters
from quire.server.responses import PromptProgressBody
from quire.types import (
    MAX_BREAKERS,
    MAX_NAMED_TEXT_CHARS,
    MAX_NAMED_TOKENS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    SAMPLERS,
    parameter_names,
)

MAX_EXTRA_FILES = 1024
MAX_RESPONSE_FIELDS = 128

# Parameters with one name in llama-server and here.
_SHARED = (
    "ignore_eos", "typical_p", "top_n_sigma", "min_keep", "dynatemp_range", "dynatemp_exponent", "xtc_probability",
    "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat",
    "mirostat_tau", "mirostat_eta", "repeat_last_n",
)  # fmt: skip
# Parameters by llama-server's name -> the name here.
LLAMA_SERVER_PARAMETERS = parameter_names("llama-server") | {name: name for name in _SHARED}

_StopText = Annotated[str, Meta(max_length=MAX_STOP_STRING_CHARS)]
_NamedText = Annotated[str, Meta(max_length=MAX_NAMED_TEXT_CHARS)]
_Schema = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "boolean", "null"]})]


class PromptObject(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt as an object, which in llama-server may have media too."""

    prompt_string: str
    multimodal_data: Annotated[list[str], Meta(max_length=0)] = []


MixedPrompt = list[int | str]
LlamaServerPrompt = (
    str | PromptObject | Annotated[list[int | str | MixedPrompt | PromptObject], Meta(max_length=MAX_IDS)]
)
# Pairs of a token or a text and its bias, of which false stands for minus infinity; or an object of them.
_Bias = float | bool
_Biases = (
    Annotated[list[tuple[int | str, _Bias]], Meta(max_length=MAX_NAMED_TOKENS)]
    | Annotated[dict[str, _Bias], Meta(max_length=MAX_NAMED_TOKENS)]
)

if TYPE_CHECKING:

    class _LlamaServerSampling(msgspec.Struct, kw_only=True):
        """Numbers and switches of SamplingParams; listed here are those that are read by name."""

        n_predict: int | None = None
        seed: int | None = None
        repeat_penalty: float | None = None
        presence_penalty: float | None = None
        frequency_penalty: float | None = None

else:
    _LlamaServerSampling = parameter_struct(LLAMA_SERVER_PARAMETERS)


class LlamaServerRequest(_LlamaServerSampling, kw_only=True):
    """Fields that completions and infills share. null means the default for each of them."""

    model: str | None = None
    lora: ScaledAdapters = None
    stream: bool | None = None
    n_cmpl: Annotated[int | None, Meta(description="samples of each prompt")] = None
    stop: _StopText | Annotated[list[_StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    samplers: Annotated[list[str], Meta(max_length=len(SAMPLERS))] | None = None
    dry_sequence_breakers: Annotated[list[_NamedText], Meta(max_length=MAX_BREAKERS)] | None = None
    logit_bias: Annotated[
        _Biases | None, Meta(description="[[token or text, bias]] or an object; false: never")
    ] = None
    grammar: Annotated[str | None, Meta(description="a grammar in GBNF")] = None
    json_schema: Annotated[_Schema, Meta(description="a JSON schema")] = UNSET
    n_probs: Annotated[int | None, Meta(description="report the N most likely tokens")] = None
    return_tokens: Annotated[bool | None, Meta(description="token ids in an answer that is not streamed")] = (
        None
    )
    return_progress: Annotated[bool | None, Meta(description="a stream begins with prompt_progress")] = None
    sse_ping_interval: Annotated[
        float | None, Meta(description="seconds of silence after which a stream has a comment; -1: never")
    ] = None
    timings_per_token: Annotated[bool | None, Meta(description="timings in every event of a stream")] = None
    response_fields: Annotated[
        Annotated[list[str], Meta(max_length=MAX_RESPONSE_FIELDS)] | None,
        Meta(description="the fields of the answer, all by default; a/b is the field b of a"),
    ] = None


class LlamaServerCompletionRequest(LlamaServerRequest, kw_only=True):
    """Body of POST /completion."""

    prompt: Annotated[
        LlamaServerPrompt, Meta(description="text, token ids, a list of both, or a list of any of these")
    ]


class ExtraFile(msgspec.Struct):
    """Text of another file of the project."""

    text: str
    filename: str = "tmp"


class InfillRequest(LlamaServerRequest, kw_only=True):
    """Body of POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_EXTRA_FILES)] | None = None
    prompt: Annotated[str, Meta(description="text after the token that opens the middle")] = ""


class LlamaServerTimings(msgspec.Struct, kw_only=True):
    """Where the time of an answer went, in milliseconds, and its tokens: prompt_n are those that were computed, cache_n
    those that were in the prefix cache.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class LlamaServerCompletion(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Answer to POST /completion and /infill, or an event of its stream, of which only the last has all fields."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    model: str = ""
    generation_settings: dict[str, Any] = {}
    prompt: str = ""
    has_new_line: bool = False
    truncated: bool = False
    stop_type: str = ""
    stopping_word: str = ""
    tokens_cached: int = 0
    timings: LlamaServerTimings | None = None
    completion_probabilities: list[dict[str, Any]] = []
    prompt_progress: PromptProgressBody | None = None


class LlamaServerErrorDetail(msgspec.Struct):
    """What went wrong: the status, text for people, and a class."""

    code: int
    message: str
    type: str


class LlamaServerErrorBody(msgspec.Struct):
    """Body of an error response, and of the last event of a stream that failed."""

    error: LlamaServerErrorDetail


_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "unavailable_error",
    501: "not_supported_error", 503: "unavailable_error",
}  # fmt: skip


def _error(error: ApiError, message: str, _: str | None) -> LlamaServerErrorBody:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return LlamaServerErrorBody(LlamaServerErrorDetail(error.status, message, kind))


LLAMA_SERVER_ERRORS = ErrorForm(_error, LlamaServerErrorBody, event_of)
LLAMA_SERVER_REFUSED: RefusedFields = {
    "cache_prompt": (True,), "id_slot": (-1,), "n_cache_reuse": (0,), "n_indent": (0,), "t_max_predict_ms": (0,),
    "post_sampling_probs": (False,), "image_data": ([],),
    "grammar_lazy": (False,), "grammar_triggers": ([],), "preserved_tokens": ([],),
    "max_tokens": (), "repetition_penalty": (), "n": (1,),
}  # fmt: skip
# Nothing is discarded from a context, so all of a prompt is kept.
LLAMA_SERVER_IGNORED = frozenset(("n_keep", "n_discard"))
