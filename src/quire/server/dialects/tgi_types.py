"""Bodies of TGI's API: https://huggingface.github.io/text-generation-inference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from quire.server.errors import ApiError, ErrorForm, event_of
from quire.server.requests import NamedSchema
from quire.types import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, PARAMETERS

# Parameters that are passed on: TGI's name -> the name here.
TGI_PARAMETERS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty", "max_new_tokens": "max_tokens", "seed": "seed", "stop": "stop",
}  # fmt: skip
# Parameters that are refused unless they ask for what happens anyway: name -> such values, and why.
TGI_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "watermark": ((False,), "must be false; this route has no watermark"),
}

_StopText = Annotated[str, Meta(max_length=MAX_STOP_STRING_CHARS)]
_SchemaOrText = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "string"]})]


class TgiJson(msgspec.Struct, tag_field="type", tag="json", forbid_unknown_fields=True):
    """JSON of a schema, given as an object or as its text."""

    value: _SchemaOrText = UNSET


class TgiJsonObject(TgiJson, tag="json_object", forbid_unknown_fields=True):
    """The other name of `json`."""


class TgiRegex(msgspec.Struct, tag_field="type", tag="regex", forbid_unknown_fields=True):
    """A text that the regular expression matches."""

    value: str


class TgiNamedSchema(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON of a schema with a name."""

    value: NamedSchema


TgiGrammar = TgiJson | TgiJsonObject | TgiRegex | TgiNamedSchema


def _number(inside: str) -> Any:
    return Meta(description=PARAMETERS[inside].help)


class TgiParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the answer. null means the default for each of them."""

    temperature: Annotated[float | None, _number("temperature")] = None
    top_k: Annotated[int | None, _number("top_k")] = None
    top_p: Annotated[float | None, _number("top_p")] = None
    typical_p: Annotated[float | None, _number("typical_p")] = None
    repetition_penalty: Annotated[float | None, _number("repetition_penalty")] = None
    frequency_penalty: Annotated[float | None, _number("frequency_penalty")] = None
    max_new_tokens: Annotated[int | None, Meta(description="default: to the end of the context")] = None
    seed: Annotated[int | None, _number("seed")] = None
    stop: Annotated[list[_StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    do_sample: Annotated[
        bool | None, Meta(description="sample without temperature, top_k and top_p too; greedy otherwise")
    ] = None
    best_of: Annotated[int | None, Meta(description="samples, of which the most probable is the answer")] = (
        None
    )
    grammar: TgiGrammar | None = None
    return_full_text: Annotated[bool | None, Meta(description="repeat the inputs before the text")] = None
    details: bool | None = None
    decoder_input_details: Annotated[bool | None, Meta(description="tokens and logprobs of the inputs")] = (
        None
    )
    top_n_tokens: Annotated[int | None, Meta(description="report the N most likely tokens")] = None
    truncate: Annotated[
        int | None, Meta(description="most tokens of the inputs; longer ones are refused, not cut")
    ] = None
    watermark: bool | None = None
    adapter_id: Annotated[str | None, Meta(description="the name of an adapter")] = None


class TgiRequest(msgspec.Struct, kw_only=True):
    """Body of POST /generate and /generate_stream."""

    inputs: Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    parameters: TgiParameters | None = None


class TgiCompatRequest(TgiRequest, kw_only=True):
    """Body of POST /."""

    stream: bool | None = None


class TgiPrefillToken(msgspec.Struct):
    """A token of the inputs; the first has no logprob."""

    id: int
    text: str
    logprob: float | None


class TgiToken(msgspec.Struct):
    """A generated token. `special` ones are not part of the text."""

    id: int
    text: str
    logprob: float | None
    special: bool


TgiReason = Literal["length", "eos_token", "stop_sequence"]


class TgiSequence(msgspec.Struct, kw_only=True):
    """Facts about a generated text. `seed` is null when nothing was drawn."""

    finish_reason: TgiReason
    generated_tokens: int
    seed: int | None
    prefill: list[TgiPrefillToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | UnsetType = UNSET


class TgiBestOf(TgiSequence, kw_only=True):
    """A sample that was not the most probable."""

    generated_text: str


class TgiDetails(TgiSequence, kw_only=True):
    """Facts about an answer."""

    best_of_sequences: list[TgiBestOf] | UnsetType = UNSET


class TgiAnswer(msgspec.Struct, kw_only=True):
    """Answer to POST /generate."""

    generated_text: str
    details: TgiDetails | UnsetType = UNSET


class TgiStreamDetails(msgspec.Struct):
    """Facts about an answer at the end of its stream."""

    finish_reason: TgiReason
    generated_tokens: int
    seed: int | None
    input_length: int


class TgiEvent(msgspec.Struct, kw_only=True):
    """An event of a stream: a token, counted from 1. The last one has the text."""

    index: int
    token: TgiToken
    top_tokens: list[TgiToken] | UnsetType = UNSET
    generated_text: str | None = None
    details: TgiStreamDetails | None = None


class TgiInfo(msgspec.Struct, kw_only=True):
    """Answer to GET /info: the model and the limits of the server."""

    model_id: str
    model_sha: str
    model_pipeline_tag: str = "text-generation"
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int = 1
    max_client_batch_size: int = 1
    router: str = "quire"
    version: str
    sha: None = None
    docker_label: None = None


class TgiErrorBody(msgspec.Struct):
    """Body of an error response, and of the last event of a stream that failed."""

    error: str
    error_type: str


_KINDS = {
    401: "authentication", 403: "permission", 404: "not_found", 429: "overloaded", 503: "healthcheck",
    504: "timeout",
}  # fmt: skip


def _error(error: ApiError, message: str, _: str | None) -> TgiErrorBody:
    default = "validation" if error.status < 500 else "generation"
    return TgiErrorBody(message, _KINDS.get(error.status, default))


# TGI answers 422 to requests that cannot be right, and 424 when generating failed.
TGI_ERRORS = ErrorForm(_error, TgiErrorBody, event_of, statuses={400: 422, 500: 424})
