"""TGI's generate and generate_stream, translated to a completion request."""

from __future__ import annotations

import secrets
import uuid
from functools import partial
from typing import Any

from quire import __version__
from quire.server.answering import AnswerStream, StreamForm, answer_whole, generating_model
from quire.server.completions import prepare_completion
from quire.server.context import ServerContext
from quire.server.dialects.asking import Renames, renamed
from quire.server.dialects.generate_route import PATH
from quire.server.dialects.tgi_answers import TgiHead, TgiStream, answer_pieces
from quire.server.dialects.tgi_types import (
    TGI_ERRORS,
    TGI_PARAMETERS,
    TGI_REFUSED,
    TgiAnswer,
    TgiCompatRequest,
    TgiEvent,
    TgiGrammar,
    TgiInfo,
    TgiNamedSchema,
    TgiParameters,
    TgiRegex,
    TgiRequest,
)
from quire.server.errors import bad_request
from quire.server.exchange import Body, Exchange
from quire.server.requests import CompletionRequest, JsonSchemaFormat, StructuredOutputs
from quire.server.routes import Get, HttpRoute, Post
from quire.types import MAX_SAMPLES, MAX_STOP_STRINGS

_NAMES: Renames = {
    r"prompt\b": "inputs",
    r"(json_schema|structured_outputs\.regex)\b": "parameters.grammar.value",
    r"response_format\.json_schema\b": "parameters.grammar.value",
    r"logprobs\b": "parameters.top_n_tokens",
    r"prompt_logprobs\b": "parameters.decoder_input_details",
    r"n\b": "parameters.best_of",
} | {rf"{inside}\b": f"parameters.{name}" for name, inside in TGI_PARAMETERS.items()}
# Parameters that turn sampling on.
_SAMPLING = ("temperature", "top_k", "top_p", "typical_p")
_SEED_BITS = 63


async def generate(context: ServerContext, exchange: Exchange, read: Body[TgiRequest]) -> None:
    """Continue a text."""
    await _answer(context, exchange, read)


async def generate_stream(context: ServerContext, exchange: Exchange, read: Body[TgiRequest]) -> None:
    """Continue a text, as a stream."""
    await _answer(context, exchange, read, stream=True)


async def compat_generate(context: ServerContext, exchange: Exchange, read: Body[TgiCompatRequest]) -> None:
    """Continue a text, as a stream if the body says so, else as a list of one answer."""
    stream = bool(read.value.stream)
    await _answer(context, exchange, read, stream=stream, listed=not stream)


async def _answer(
    context: ServerContext, exchange: Exchange, read: Body[Any], *, stream: bool = False, listed: bool = False
) -> None:
    """Answer, whole or as a stream."""
    body: TgiRequest = read.value
    asked, given = body.parameters or TgiParameters(do_sample=True), body.parameters is not None
    with renamed({"model": "parameters.adapter_id"}):
        generating_model(context, exchange, asked.adapter_id)
    _check(asked, stream=stream)
    samples = asked.do_sample or any(getattr(asked, name) is not None for name in _SAMPLING)
    if (asked.best_of or 1) > 1 and not samples:
        raise bad_request("parameters.best_of", "parameters.best_of: needs do_sample, or a temperature")
    if (asked.best_of or 1) > 1 and context.hooks is not None:
        message = "parameters.best_of: not with this server's output hook"
        raise bad_request("parameters.best_of", message, "unsupported_parameter")
    drawn = samples and asked.temperature != 0
    if drawn and asked.seed is None:
        asked.seed = secrets.randbits(_SEED_BITS)  # so that details can name it
    with renamed(_NAMES):
        fields = _fields(asked) | ({"temperature": 0.0} if given and not samples else {})
        if (stream or asked.details or fields["n"] > 1) and context.hooks is None:
            fields.setdefault("logprobs", 0)
        made = await prepare_completion(
            context, exchange, Body(read.size, CompletionRequest(prompt=body.inputs, **fields)),
            f"tgi-{uuid.uuid4().hex}", length=None,
        )  # fmt: skip
        (ask,) = made.asks
        prompt = ask.request.prompt_token_ids
        if asked.truncate is not None and not len(prompt) <= asked.truncate:
            message = f"parameters.truncate: {asked.truncate} is below the {len(prompt)} tokens of inputs, and nothing "
            raise bad_request("parameters.truncate", f"{message}is cut", "unsupported_parameter")
        head = TgiHead(
            texts=context.texts, special=context.engine.special_ids, prompt=prompt,
            inputs=body.inputs if asked.return_full_text else "",
            seed=asked.seed if drawn else None, details=bool(asked.details or asked.decoder_input_details),
            prefill=bool(asked.decoder_input_details), top=bool(asked.top_n_tokens), listed=listed,
            hidden=context.hooks is not None,
        )  # fmt: skip
        if not stream:
            await answer_whole(
                context, exchange, [ask], partial(answer_pieces, head), logprobs="parameters.top_n_tokens"
            )
            return
        events = TgiStream(head)
        form = StreamForm(events.chunk_of, events.last, whole=True, token_of=events.token_of, kept=True)
        await AnswerStream(context, exchange, form, logprobs="parameters.top_n_tokens").write([ask])


def _check(asked: TgiParameters, *, stream: bool) -> None:
    """Raise ApiError for what is not supported, or not in a stream."""
    for name, (same, why) in TGI_REFUSED.items():
        given = getattr(asked, name)
        if given is not None and given not in same:
            raise bad_request(f"parameters.{name}", f"parameters.{name}: {why}", "unsupported_parameter")
    if not stream:
        return
    for name, wrong in (
        ("best_of", (asked.best_of or 1) != 1), ("decoder_input_details", asked.decoder_input_details),
    ):  # fmt: skip
        if wrong:
            message = f"parameters.{name}: not supported in a stream"
            raise bad_request(f"parameters.{name}", message, "unsupported_parameter")


def _fields(asked: TgiParameters) -> dict[str, Any]:
    """Fields of a completion request. Raises ApiError for samples that are none."""
    found = {inside: getattr(asked, name) for name, inside in TGI_PARAMETERS.items()}
    found |= {"include_stop_str_in_output": True, "n": 1 if asked.best_of is None else asked.best_of}
    if asked.top_n_tokens:
        found["logprobs"] = asked.top_n_tokens
    if asked.decoder_input_details:
        found["prompt_logprobs"] = 0
    return found | ({} if asked.grammar is None else _grammar(asked.grammar))


def _grammar(given: TgiGrammar) -> dict[str, Any]:
    """The field of a completion request that says what the text must look like."""
    if isinstance(given, TgiRegex):
        return {"structured_outputs": StructuredOutputs(regex=given.value)}
    if isinstance(given, TgiNamedSchema):
        return {"response_format": JsonSchemaFormat(given.value)}
    return {"json_schema": given.value}


async def info(context: ServerContext, _: Exchange) -> TgiInfo:
    """The model and the limits of the server."""
    card = context.card()
    return TgiInfo(
        model_id=context.names()[0], model_sha=card.config_sha256,
        max_concurrent_requests=context.config.max_num_queued_reqs, max_best_of=MAX_SAMPLES,
        max_stop_sequences=MAX_STOP_STRINGS, max_input_tokens=card.max_model_len - 1,
        max_total_tokens=card.max_model_len, version=__version__,
    )  # fmt: skip


ROUTES: tuple[HttpRoute, ...] = (
    Post(
        path=PATH, summary="Continue a text, in TGI's form", tag="tgi", handler=generate, request=TgiRequest,
        response=TgiAnswer, ignored=frozenset(), api="tgi", errors=TGI_ERRORS,
    ),
    Post(
        path="/generate_stream", summary="Continue a text, as a stream in TGI's form", tag="tgi",
        handler=generate_stream, request=TgiRequest, response=TgiEvent, chunk=TgiEvent, ignored=frozenset(),
        api="tgi", errors=TGI_ERRORS,
    ),
    Post(
        path="/", summary="Continue a text, in TGI's form", tag="tgi", handler=compat_generate,
        request=TgiCompatRequest, response=list[TgiAnswer], chunk=TgiEvent, ignored=frozenset(), api="tgi",
        errors=TGI_ERRORS,
    ),
    Get(
        path="/info", summary="The model and the limits of the server, in TGI's form", tag="tgi", handler=info,
        response=TgiInfo, api="tgi", errors=TGI_ERRORS,
    ),
)  # fmt: skip
