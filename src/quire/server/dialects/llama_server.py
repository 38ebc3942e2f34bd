"""llama-server's completions and infills, translated to a completion request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from quire.engine.api import GenerateAsk
from quire.server.answering import (
    AnswerStream,
    StreamForm,
    answer_whole,
    check_streaming,
    ping_seconds,
)
from quire.server.completions import prepare_completion
from quire.server.context import ServerContext
from quire.server.dialects.asking import Renames, renamed
from quire.server.dialects.llama_server_answers import LlamaServerHead, LlamaServerStream, answer_pieces
from quire.server.dialects.llama_server_types import (
    LLAMA_SERVER_ERRORS,
    LLAMA_SERVER_IGNORED,
    LLAMA_SERVER_PARAMETERS,
    LLAMA_SERVER_REFUSED,
    InfillRequest,
    LlamaServerCompletion,
    LlamaServerCompletionRequest,
    LlamaServerPrompt,
    LlamaServerRequest,
    PromptObject,
)
from quire.server.errors import bad_request
from quire.server.exchange import Body, Exchange
from quire.server.requests import CompletionRequest
from quire.server.routes import HttpRoute, Post
from quire.server.sampling import check_choices
from quire.server.scaled_adapters import served_with
from quire.text.infill import InfillAsk
from quire.types import SamplingParams

_NAMES: Renames = {rf"{inside}\b": name for name, inside in LLAMA_SERVER_PARAMETERS.items()} | {
    r"logprobs\b": "n_probs", r"banned_token_ids\b": "logit_bias", r"n\b": "n_cmpl",
    r"return_token_ids\b": "return_tokens",
}  # fmt: skip
# Seeds that ask for a random one: -1, and the same as 32 bits.
_RANDOM = (-1, 2**32 - 1)


async def completion(
    context: ServerContext, exchange: Exchange, read: Body[LlamaServerCompletionRequest]
) -> None:
    """Continue prompts, whole or as a stream."""
    given, read.value.prompt = read.value.prompt, ""
    prompts, listed = _separate(given)
    with renamed(_NAMES):
        check_choices(len(prompts), read.value.n_cmpl or 1)
    made = list(await asyncio.gather(*(_token_ids(context, prompt) for prompt in prompts)))
    await _answer(context, exchange, read, made, listed=listed)


async def infill(context: ServerContext, exchange: Exchange, read: Body[InfillRequest]) -> None:
    """Fill in what stands between two texts."""
    body = read.value
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    asked = InfillAsk(prefix=body.input_prefix, suffix=body.input_suffix, files=files, opening=body.prompt)
    body.input_prefix = body.input_suffix = body.prompt = ""
    body.input_extra = None
    with renamed({"prompt": "input_prefix", "suffix": "input_suffix"}):
        made = await context.engine.encode_infill(asked)
    await _answer(context, exchange, read, [made.token_ids], listed=False, stop_ids=made.stop_ids)


def _separate(given: LlamaServerPrompt) -> tuple[Sequence[Any], bool]:
    """The prompts of a request, and whether their answers come as a list. Raises ApiError for a list without any."""
    if not isinstance(given, list):
        return [given], False
    if not given:
        raise bad_request("prompt", "prompt: is empty; expected a text, token ids, or a list of them")
    if any(isinstance(part, int) for part in given):
        if any(isinstance(part, list | PromptObject) for part in given):
            raise bad_request("prompt", "prompt: a list with token ids is one prompt, and holds no others")
        return [given], False
    return given, True


async def _token_ids(context: ServerContext, prompt: str | PromptObject | list[int | str]) -> list[int]:
    """A prompt as token ids: what the tokenizer adds around a text is added if it begins with one."""
    encode = context.engine.encode
    if isinstance(prompt, PromptObject):
        prompt = prompt.prompt_string
    if isinstance(prompt, str):
        return await encode(prompt)
    ids: list[int] = []
    for position, part in enumerate(prompt):
        ids += [part] if isinstance(part, int) else await encode(part, add_special_tokens=not position)
    return ids


class _Bias(NamedTuple):
    """Biases by token, and the tokens that must not come."""

    logit_bias: dict[str, float]
    banned_token_ids: list[int]


async def _bias(context: ServerContext, body: LlamaServerRequest) -> _Bias:
    """The biases of a request: a text stands for each of its tokens. Raises ApiError for true as a bias."""
    given = body.logit_bias
    pairs = [(_token(name), bias) for name, bias in given.items()] if isinstance(given, dict) else given or ()
    found = _Bias({}, [])
    for token, bias in pairs:
        if bias is True:
            raise bad_request("logit_bias", "logit_bias: a bias is a number, or false")
        ids = [token] if isinstance(token, int) else await _inside(context, token)
        if bias is False:
            found.banned_token_ids.extend(ids)
        else:
            found.logit_bias.update((str(one), bias) for one in ids)
    return found


def _token(name: str) -> int | str:
    """A key of an object of biases: a token id if it is a number."""
    return int(name) if name.isascii() and name.isdigit() and len(name) <= 10 else name


async def _inside(context: ServerContext, text: str) -> list[int]:
    """The tokens of a text, without control tokens."""
    return await context.engine.encode(text, add_special_tokens=False, parse_special=False, name="logit_bias")


async def _fields(context: ServerContext, body: LlamaServerRequest) -> dict[str, Any]:
    """Fields of a completion request. Raises ApiError for a bias that is none."""
    found = {inside: getattr(body, name) for name, inside in LLAMA_SERVER_PARAMETERS.items()}
    if (length := body.n_predict) is not None:
        found["max_tokens"] = None if length in {-1, -2} else length or 1
    if body.seed in _RANDOM:
        found["seed"] = None
    bias = await _bias(context, body)
    return found | {
        "n": body.n_cmpl, "stop": body.stop, "logprobs": body.n_probs or None, "grammar": body.grammar,
        "json_schema": body.json_schema, "logit_bias": bias.logit_bias or None,
        "banned_token_ids": bias.banned_token_ids or None, "stream": body.stream, "samplers": body.samplers,
        "dry_sequence_breakers": body.dry_sequence_breakers,
        "return_token_ids": body.return_tokens, "return_progress": body.return_progress,
        "sse_ping_interval": body.sse_ping_interval,
    }  # fmt: skip


async def _answer(
    context: ServerContext,
    exchange: Exchange,
    read: Body[Any],
    prompts: list[list[int]],
    *,
    listed: bool,
    stop_ids: Sequence[int] = (),
) -> None:
    """Answer, whole or as a stream. `stop_ids` end an answer too."""
    body: LlamaServerRequest = read.value
    model = (await served_with(context, exchange, body.model, body.lora)).name
    if body.stream and body.n_predict == 0:
        message = "stream: nothing to stream, because n_predict is 0"
        raise bad_request("stream", message, "unsupported_parameter")
    with renamed(_NAMES):
        asked = CompletionRequest(prompt=prompts, **await _fields(context, body))  # type: ignore[arg-type]
        asked.stop_token_ids = list(stop_ids)
        check_streaming(asked)
        name = f"llama-{uuid.uuid4().hex}"
        made = await prepare_completion(context, exchange, Body(read.size, asked), name, length=None)
        params = made.asks[0].request.params
        head = LlamaServerHead(
            model=model,
            settings=settings_of(body, params, model, context.engine.card.max_model_len),
            prompts=await _texts(context, exchange, body, made.asks),
            texts=context.texts,
            fields=tuple(body.response_fields or ()),
            tokens=bool(body.return_tokens),
            listed=listed or params.n > 1,
            probabilities=bool(body.n_probs),
            per_token=bool(body.timings_per_token),
            prompt_only=body.n_predict == 0,
            hidden=context.hooks is not None,
        )
        await _write(context, exchange, asked, made.asks, head)


async def _write(
    context: ServerContext,
    exchange: Exchange,
    body: CompletionRequest,
    asks: list[GenerateAsk],
    head: LlamaServerHead,
) -> None:
    if not body.stream:
        await answer_whole(context, exchange, asks, partial(answer_pieces, head), logprobs="n_probs")
        return
    evaluated = [len(ask.request.prompt_token_ids) for ask in asks]
    events = LlamaServerStream(head, evaluated, asks[0].request.params.n)
    form = StreamForm(events.chunk_of, events.last, begun=events.begun, whole=True, progress=events.progress)
    seconds = ping_seconds(body)
    await AnswerStream(context, exchange, form, logprobs="n_probs", ping_seconds=seconds).write(asks)


async def _texts(
    context: ServerContext, exchange: Exchange, body: LlamaServerRequest, asks: list[GenerateAsk]
) -> list[str]:
    """The prompts as the model reads them, which are part of the answers unless only other fields are wanted."""
    if body.response_fields and "prompt" not in body.response_fields:
        return []
    found = []
    for ask in asks:
        ids = ask.request.prompt_token_ids
        context.memory.take_echo(exchange.held, len(ids))
        found.append(await context.engine.decode(ids))
    return found


def settings_of(body: LlamaServerRequest, params: SamplingParams, model: str, window: int) -> dict[str, Any]:
    """The parameters of an answer by llama-server's names."""
    found: dict[str, Any] = {"n_ctx": window, "model": model}
    found |= {name: getattr(params, inside) for name, inside in LLAMA_SERVER_PARAMETERS.items()}
    length = -1 if body.n_predict is None else body.n_predict
    bias: list[tuple[int | str, float | None]] = [*params.logit_bias.items()]
    bias += [(token, None) for token in params.banned_token_ids]  # JSON has no minus infinity
    return found | {
        "seed": _RANDOM[1] if params.seed is None else params.seed,
        "n_predict": length, "max_tokens": length, "samplers": params.samplers or (),
        "dry_sequence_breakers": params.dry_sequence_breakers, "n_keep": -1, "n_discard": 0,
        "stop": list(params.stop), "stream": bool(body.stream), "n_probs": body.n_probs or 0,
        "logit_bias": [{"bias": value, "token": token} for token, value in bias],
        "grammar": body.grammar or "", "lora": body.lora or (), "post_sampling_probs": False,
        "timings_per_token": bool(body.timings_per_token),
    }  # fmt: skip


_COMPLETIONS: Any = LlamaServerCompletion | list[LlamaServerCompletion]  # for one prompt, for several


def _post(path: str, summary: str, handler: Any, request: type[Any]) -> Post[Any, Any]:
    return Post(
        path=path, summary=summary, tag="llama-server", handler=handler, request=request,
        response=_COMPLETIONS, chunk=LlamaServerCompletion, refused=LLAMA_SERVER_REFUSED,
        ignored=LLAMA_SERVER_IGNORED,
        api="llama-server", errors=LLAMA_SERVER_ERRORS,
    )  # fmt: skip


ROUTES: tuple[HttpRoute, ...] = (
    *(
        _post(path, "Continue prompts, in llama-server's form", completion, LlamaServerCompletionRequest)
        for path in ("/completion", "/completions")
    ),
    _post("/infill", "Fill in the middle of a text, in llama-server's form", infill, InfillRequest),
)
