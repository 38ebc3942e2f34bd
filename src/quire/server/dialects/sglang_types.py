"""Bodies of SGLang's own API: https://docs.sglang.ai/basic_usage/native_api.html."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from quire.server.chunks import DONE
from quire.server.dialects.parameter_fields import parameter_struct
from quire.server.errors import ApiError, ErrorForm, event_of
from quire.server.fields import RefusedFields
from quire.server.requests import MAX_IDS, MAX_SALT_CHARS
from quire.types import MAX_NAMED_TOKENS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, parameter_names

# Parameters by SGLang's name -> the name here.
SGLANG_PARAMETERS = parameter_names("SGLang") | {
    "min_new_tokens": "min_tokens", "n": "n", "ignore_eos": "ignore_eos", "no_stop_trim": "include_stop_str_in_output",
    "skip_special_tokens": "skip_special_tokens",
}  # fmt: skip
DEFAULT_NEW_TOKENS = 128

_StopText = Annotated[str, Meta(max_length=MAX_STOP_STRING_CHARS)]
_Text = Annotated[Raw | UnsetType, Meta(extra_json_schema={"type": ["object", "string", "null"]})]

if TYPE_CHECKING:

    class _SglangSampling(msgspec.Struct, kw_only=True):
        """Numbers and switches of SamplingParams; listed here are those that are read by name."""

        max_new_tokens: int | None = None

else:
    _SglangSampling = parameter_struct(SGLANG_PARAMETERS)


class SglangSampling(_SglangSampling, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the answers. null means the default for each of them."""

    stop: _StopText | Annotated[list[_StopText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_NAMED_TOKENS)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_NAMED_TOKENS)] | None = None
    json_schema: Annotated[_Text, Meta(description="a JSON schema, or its text")] = UNSET
    regex: str | None = None
    ebnf: Annotated[str | None, Meta(description="a grammar in GBNF")] = None
    structural_tag: _Text = UNSET
    # Values that ask for what happens anyway.
    spaces_between_special_tokens: Literal[True] | None = None
    custom_params: None = None
    stop_regex: None = None
    stream_interval: Literal[1] | None = None


_Parameters = SglangSampling | list[SglangSampling]


class SglangRequest(msgspec.Struct, kw_only=True):
    """Body of POST /generate."""

    text: Annotated[str | list[str] | None, Meta(description="one prompt or several")] = None
    input_ids: Annotated[
        Annotated[list[int | list[int]], Meta(max_length=MAX_IDS)] | None,
        Meta(description="token ids in place of text: one prompt, or a list of prompts"),
    ] = None
    sampling_params: Annotated[
        _Parameters | None, Meta(description="one object for all prompts, or equal ones for each")
    ] = None
    model: str | None = None
    lora_path: Annotated[str | None, Meta(description="the name of an adapter")] = None
    rid: Annotated[str | list[str] | None, Meta(description="ids of the answers")] = None
    extra_key: Annotated[
        Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None,
        Meta(description="the prefix cache is shared only between equal keys"),
    ] = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[
        int | None, Meta(description="report logprobs of the prompt from this token on; -1: none")
    ] = None
    top_logprobs_num: Annotated[int | None, Meta(description="report the N most likely tokens")] = None
    return_text_in_logprobs: bool | None = None


class SglangReason(msgspec.Struct, omit_defaults=True):
    """Why an answer ended: `matched` is the stop string or token, `length` the number of tokens."""

    type: str
    matched: int | str | UnsetType | None = UNSET
    length: int | UnsetType = UNSET


SglangLogprob = tuple[float | None, int, str | None]


class SglangMeta(msgspec.Struct, kw_only=True):
    """Facts about an answer; e2e_latency in seconds, at its end. Logprobs are triples of value, token id and text."""

    id: str
    finish_reason: SglangReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[SglangLogprob] | UnsetType = UNSET
    output_token_logprobs: list[SglangLogprob] | UnsetType = UNSET
    input_top_logprobs: list[list[SglangLogprob] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[SglangLogprob] | None] | UnsetType = UNSET


class SglangAnswer(msgspec.Struct, kw_only=True):
    """Answer to POST /generate, or an event of its stream: with all of the text so far."""

    text: str
    output_ids: list[int]
    meta_info: SglangMeta
    index: int | UnsetType = UNSET


class SglangModelInfo(msgspec.Struct, kw_only=True):
    """Answer to GET /get_model_info."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None = None
    weight_version: str
    has_image_understanding: bool = False
    has_audio_understanding: bool = False


class SglangErrorDetail(msgspec.Struct):
    """What went wrong."""

    message: str


class SglangErrorBody(msgspec.Struct):
    """Body of an error response, and of the event before the end mark of a stream that failed."""

    error: SglangErrorDetail


def _error(_: ApiError, message: str, __: str | None) -> SglangErrorBody:
    return SglangErrorBody(SglangErrorDetail(message))


def _ended(body: bytes) -> bytes:
    return event_of(body) + DONE


SGLANG_ERRORS = ErrorForm(_error, SglangErrorBody, _ended)
SGLANG_REFUSED: RefusedFields = {
    "input_embeds": (), "image_data": ([],), "audio_data": ([],), "video_data": ([],), "modalities": ([],),
    "token_ids_logprob": ([],), "lora_id": (), "custom_logit_processor": (),
    "return_hidden_states": (False,), "session_params": ({},), "priority": (), "return_routed_experts": (False,),
    "bootstrap_host": (), "bootstrap_port": (), "bootstrap_room": (), "data_parallel_rank": (),
    "background": (False,),
}  # fmt: skip
# What concerns the log alone.
SGLANG_IGNORED = frozenset(("log_metrics",))
