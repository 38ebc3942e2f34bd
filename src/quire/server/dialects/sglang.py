"""SGLang's generate and its pages, translated to a completion request."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any

import msgspec

from quire.engine.api import GenerateAsk
from quire.server.answering import AnswerStream, StreamForm, answer_id, answer_whole, generating_model
from quire.server.completions import PreparedCompletion, prepare_completion
from quire.server.context import ServerContext
from quire.server.control import server_info
from quire.server.dialects.asking import Renames, renamed
from quire.server.dialects.generate_route import PATH
from quire.server.dialects.sglang_answers import SglangHead, SglangStream, answer_pieces
from quire.server.dialects.sglang_types import (
    DEFAULT_NEW_TOKENS,
    SGLANG_ERRORS,
    SGLANG_IGNORED,
    SGLANG_PARAMETERS,
    SGLANG_REFUSED,
    SglangAnswer,
    SglangModelInfo,
    SglangRequest,
    SglangSampling,
)
from quire.server.errors import ApiError, bad_request, retry_headers
from quire.server.exchange import Body, Exchange
from quire.server.requests import CompletionRequest, StructuredOutputs
from quire.server.routes import PLAIN, Act, Get, HttpRoute, Post
from quire.types import FinishReason, Request, SamplingParams, TokenIds

_MAPPED = {inside: name for name, inside in SGLANG_PARAMETERS.items()} | {
    "stop": "stop", "stop_token_ids": "stop_token_ids", "logit_bias": "logit_bias",
    "json_schema": "json_schema", r"structured_outputs\.regex": "regex", "grammar": "ebnf",
    r"structured_outputs\.structural_tag": "structural_tag",
}  # fmt: skip
_NAMES: Renames = {
    "logprobs": "top_logprobs_num", "prompt_logprobs_start": "logprob_start_len",
    "prompt_logprobs": "top_logprobs_num", "request_id": "rid", "cache_salt": "extra_key",
} | {rf"{inside}\b": f"sampling_params.{name}" for inside, name in _MAPPED.items()}  # fmt: skip

_SECONDS = 10.0  # that a flush may take


async def generate(context: ServerContext, exchange: Exchange, read: Body[SglangRequest]) -> None:
    """Continue prompts, whole or as a stream."""
    body = read.value
    with renamed({"model": "model" if body.lora_path is None else "lora_path"}):
        generating_model(context, exchange, body.model if body.lora_path is None else body.lora_path)
    field, prompts, listed = _prompts(body)
    sampling = _sampling(body)
    _check_logprobs(body)
    _check_stream(exchange, body, sampling)
    with renamed({r"prompt\b": field, **_NAMES}):
        asked = CompletionRequest(prompt=prompts, **_fields(body, sampling))
        name = f"sglang-{uuid.uuid4().hex}"
        made = await prepare_completion(
            context, exchange, Body(read.size, asked), name, length=DEFAULT_NEW_TOKENS
        )
        head = _head(context, body, sampling, made, listed=listed)
        await _write(context, exchange, made.asks, head, stream=bool(body.stream))


def _prompts(body: SglangRequest) -> tuple[str, Any, bool]:
    """The field with the prompts, the prompts, and whether they are a list. Raises ApiError unless there is one such
    field.
    """
    field, given = ("text", body.text) if body.input_ids is None else ("input_ids", body.input_ids)
    if given is None or (body.text is not None and body.input_ids is not None):
        raise bad_request("text", "text: set exactly one of text and input_ids")
    body.text = body.input_ids = None
    return field, given, isinstance(given, list) and not (given and isinstance(given[0], int))


def _sampling(body: SglangRequest) -> SglangSampling:
    """The parameters of all prompts. Raises ApiError for different ones."""
    given = body.sampling_params
    if not isinstance(given, list):
        return given or SglangSampling()
    if len({msgspec.json.encode(one) for one in given}) > 1:
        message = "sampling_params: must be equal for all prompts; send others in a request of their own"
        raise bad_request("sampling_params", message, "unsupported_parameter")
    return given[0] if given else SglangSampling()


def _check_logprobs(body: SglangRequest) -> None:
    """Raise ApiError for options of logprobs without these."""
    options = {
        "top_logprobs_num": body.top_logprobs_num or None,
        "logprob_start_len": None if body.logprob_start_len in {None, -1} else body.logprob_start_len,
        "return_text_in_logprobs": body.return_text_in_logprobs or None,
    }
    for name, given in options.items():
        if given is not None and not body.return_logprob:
            raise bad_request(name, f"{name}: needs return_logprob to be true")


def _check_stream(exchange: Exchange, body: SglangRequest, sampling: SglangSampling) -> None:
    """Raise ApiError for what cannot be streamed: each event repeats all that there is so far."""
    if not body.stream:
        return
    why = None
    if body.return_logprob:
        why = "not supported with return_logprob"
    elif sampling.max_new_tokens == 0:
        why = "nothing to stream, because max_new_tokens is 0"
    elif exchange.holds_back:
        why = "not over HTTP/1.0, where a stream is held until its end"
    if why is not None:
        raise bad_request("stream", f"stream: {why}", "unsupported_parameter")


def _fields(body: SglangRequest, sampling: SglangSampling) -> dict[str, Any]:
    """Fields of a completion request."""
    found = {inside: getattr(sampling, name) for name, inside in SGLANG_PARAMETERS.items()}
    if sampling.max_new_tokens == 0:
        found["max_tokens"] = 1
    found |= {
        "stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids, "logit_bias": sampling.logit_bias,
        "json_schema": sampling.json_schema, "grammar": sampling.ebnf, "stream": body.stream,
        "cache_salt": body.extra_key,
    }  # fmt: skip
    if sampling.regex is not None or sampling.structural_tag is not msgspec.UNSET:
        found["structured_outputs"] = StructuredOutputs(
            regex=sampling.regex, structural_tag=sampling.structural_tag
        )
    if body.return_logprob:
        found["logprobs"] = body.top_logprobs_num or 0
        if (start := body.logprob_start_len) is not None and start != -1:
            if start < 0:
                raise bad_request("logprob_start_len", f"logprob_start_len: {start} is below -1")
            found |= {"prompt_logprobs": found["logprobs"], "prompt_logprobs_start": start + 1}
    return found


def _head(
    context: ServerContext,
    body: SglangRequest,
    sampling: SglangSampling,
    made: PreparedCompletion,
    *,
    listed: bool,
) -> SglangHead:
    """What the answers have in common. Raises ApiError for ids that do not fit, and a start behind a prompt."""
    prompts = [prompt.token_ids for prompt in made.prompts]
    params = made.asks[0].request.params
    start = None if params.prompt_logprobs is None else body.logprob_start_len
    if start is not None and start >= (shortest := min(map(len, prompts))):
        message = f"logprob_start_len: {start} is not below the {shortest} tokens of a prompt"
        raise bad_request("logprob_start_len", message)
    return SglangHead(
        ids=_ids(body.rid, len(prompts)),
        prompts=prompts,
        samples=params.n,
        listed=listed or params.n > 1,
        logprobs=bool(body.return_logprob),
        top=bool(body.top_logprobs_num),
        texts=context.texts if body.return_text_in_logprobs else None,
        start=start,
        prompt_only=sampling.max_new_tokens == 0,
        hidden=context.hooks is not None,
    )


def _ids(given: str | list[str] | None, prompts: int) -> list[str]:
    """The id of the answer to each prompt. Raises ApiError."""
    if given is None:
        return [uuid.uuid4().hex for _ in range(prompts)]
    ids = [given] if isinstance(given, str) else given
    if len(ids) == 1 and prompts > 1:
        ids = [f"{ids[0]}_{number}" for number in range(prompts)]
    if len(ids) != prompts:
        raise bad_request("rid", f"rid: {len(ids)} ids for {prompts} prompts")
    for one in ids:
        answer_id("", one)
    return ids


async def _write(
    context: ServerContext, exchange: Exchange, asks: list[GenerateAsk], head: SglangHead, *, stream: bool
) -> None:
    if not stream:
        await answer_whole(context, exchange, asks, partial(answer_pieces, head), logprobs="top_logprobs_num")
        return
    events = SglangStream(head)
    form = StreamForm(
        events.chunk_of, events.last, begun=events.begun, whole=True, token_of=events.token_of, kept=True
    )
    await AnswerStream(context, exchange, form).write(asks)


async def model_info(context: ServerContext, _: Exchange) -> SglangModelInfo:
    """What is served."""
    card = context.card()
    return SglangModelInfo(
        model_path=card.name, tokenizer_path=card.name, is_generation=card.pooling is None,
        weight_version=card.config_sha256,
    )  # fmt: skip


async def flush_cache(context: ServerContext, exchange: Exchange) -> None:
    """Forget the cached prefixes that no running sequence holds. Raises ApiError 503 when the engine is silent."""
    context.card()
    if not await context.engine.clear_prefix_cache(_SECONDS):
        message = f"the engine has not answered within {_SECONDS:g} s"
        raise ApiError(503, message, code="not_flushed", headers=retry_headers(1.0))
    await exchange.respond(200, b"Cache flushed.\n", content_type=PLAIN)


async def health_generate(context: ServerContext, _: Exchange) -> bytes:
    """200 if a token can be generated. An engine that runs requests completes steps, or is not ready.

    Raises ApiError 503 when the token does not come.
    """
    card = context.card()
    if context.engine.stats.running or card.pooling is not None:
        return b""
    request = Request(
        request_id=f"health-{uuid.uuid4().hex}",
        prompt_token_ids=TokenIds([0]),
        params=SamplingParams(max_tokens=1, temperature=0.0),
        arrival=time.monotonic(),
    )
    stream = context.engine.generate(GenerateAsk(request=request, keep_output=False))
    reason = None
    async for delta in stream:
        reason = delta.finish_reason
    if reason not in {FinishReason.STOP, FinishReason.LENGTH}:
        raise ApiError(
            503, f"no token was generated: {reason}", code="not_healthy", headers=retry_headers(1.0)
        )
    return b""


_ANSWERS: Any = SglangAnswer | list[SglangAnswer]  # to one prompt, to several

ROUTES: tuple[HttpRoute, ...] = (
    Post(
        path=PATH, summary="Continue prompts, in SGLang's form", tag="sglang", handler=generate,
        request=SglangRequest, response=_ANSWERS, chunk=SglangAnswer, refused=SGLANG_REFUSED,
        ignored=SGLANG_IGNORED, api="sglang", errors=SGLANG_ERRORS,
    ),
    *(
        Act(
            verb=verb, path="/flush_cache", summary="Forget cached prefixes", tag="sglang", handler=flush_cache,
            response=str, media=PLAIN, api="sglang", errors=SGLANG_ERRORS, admin=True,
        )
        for verb in ("GET", "POST")
    ),
    Get(
        path="/get_server_info", summary="The model, and the options of the server", tag="sglang",
        handler=server_info, response=dict, api="sglang", errors=SGLANG_ERRORS, admin=True,
    ),
    *(
        Get(
            path=path, summary="What is served, in SGLang's form", tag="sglang", handler=model_info,
            response=SglangModelInfo, api="sglang", errors=SGLANG_ERRORS,
        )
        for path in ("/get_model_info", "/model_info")
    ),
    Get(
        path="/health_generate", summary="200 if a token can be generated", tag="sglang", handler=health_generate,
        response=str, media=PLAIN, api="sglang", errors=SGLANG_ERRORS,
    ),
)  # fmt: skip
