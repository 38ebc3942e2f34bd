"""From request fields to SamplingParams."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.beams import Beams
from quire.core.policy import BACKGROUND
from quire.engine.api import GenerateAsk
from quire.engine.policies import named_policies
from quire.engine.request_forms import guided
from quire.objectives import ServiceTerms, class_of
from quire.parameters import TextTokens
from quire.server.context import ServerContext
from quire.server.draft_marks import places_for
from quire.server.errors import PREDICTED_TTFT, ApiError, bad_request, predicted_ttft
from quire.server.exchange import Exchange
from quire.server.requests import (
    MAX_TOP_LOGPROBS,
    SCALARS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from quire.server.transfers import with_transfer
from quire.types import PARAMETERS, Request, SamplingParams, TokenIds

_NO_BEAMS = Beams(width=1)
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
# Limit of the logprob entries of one prompt: candidates times positions.
MAX_PROMPT_LOGPROB_ENTRIES = 1 << 18
# The same limit for all prompts of a request, and for the generated tokens of all its samples.
MAX_LOGPROB_ENTRIES = 1 << 20
# Limit of the prompts of one request times the samples of each.
MAX_CHOICES = 1024
_SESSION_SECONDS = 300.0  # for which what a conversation has computed waits for its next turn

# Parameters passed on as given. Lengths and logprobs are handled separately for chats and completions.
_LISTS = ("allowed_token_ids", "bad_words", "dry_sequence_breakers", "samplers")
_SAME = (*(name for name in SCALARS if name not in {"max_tokens", "logprobs"}), *_LISTS)


def chat_params(body: ChatCompletionRequest, defaults: Mapping[str, float | int]) -> SamplingParams:
    """Sampling parameters of a chat request: up to the end of the context unless a length is given.

    Raises ApiError or RequestError naming the field.
    """
    if body.max_completion_tokens is not None and body.max_tokens not in {None, body.max_completion_tokens}:
        raise bad_request(
            "max_completion_tokens", "max_completion_tokens: differs from max_tokens; set only one of them"
        )
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise bad_request("top_logprobs", f"top_logprobs: {top} is not in [0, {MAX_TOP_LOGPROBS}]")
    if top and not body.logprobs:
        raise bad_request("top_logprobs", "top_logprobs: needs logprobs to be true")
    given: dict[str, Any] = {"logprobs": top or 0} if body.logprobs else {}
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    length = getattr(body, name)
    _check_length(name, length)
    return _params(body, defaults, {**given, "max_tokens": length})


def scores_only(body: CompletionRequest) -> bool:
    """Whether a request only wants its prompt back: `echo` with `max_tokens` 0.

    Evaluation harnesses request the logprobs of a text this way. A step samples a token all the same; it is dropped.
    """
    return bool(body.echo) and body.max_tokens == 0


def completion_params(
    body: CompletionRequest,
    defaults: Mapping[str, float | int],
    length: int | None = DEFAULT_COMPLETION_TOKENS,
) -> SamplingParams:
    """Sampling parameters of a completion request, of `length` tokens where it asks for none. Raises ApiError or
    RequestError naming the field.
    """
    if scores_only(body):
        given: dict[str, Any] = {"max_tokens": 1, "min_tokens": 0}
    else:
        _check_length("max_tokens", body.max_tokens)
        given = {"max_tokens": body.max_tokens or length}
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            given["prompt_logprobs"] = body.logprobs
    if body.best_of is not None and not body.use_beam_search:
        given |= _best_of(body, body.best_of)
    return _params(body, defaults, given)


def _best_of(body: CompletionRequest, samples: int) -> dict[str, Any]:
    """Parameters of a request of which only the `n` most probable samples are returned."""
    wanted, most = 1 if body.n is None else body.n, PARAMETERS["n"].high
    if (refusal := PARAMETERS["n"].refusal(wanted)) is not None:
        raise bad_request("n", f"n: {refusal}")
    if not wanted <= samples <= most:
        raise bad_request("best_of", f"best_of: {samples} is not in [{wanted}, {most}], from n on")
    if samples > wanted and body.stream:
        raise bad_request("best_of", "best_of: a stream cannot wait for the best", "unsupported_parameter")
    return {"n": samples, "logprobs": body.logprobs or 0} if samples > wanted else {}


def _params(
    body: GenerationRequest, defaults: Mapping[str, float | int], given: Mapping[str, Any]
) -> SamplingParams:
    values: dict[str, Any] = {} if body.use_beam_search else dict(defaults)
    values |= {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    values |= given
    if body.stop is not None:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    if body.stop_token_ids:
        values["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.banned_token_ids:
        values["banned_token_ids"] = tuple(body.banned_token_ids)
    return SamplingParams(**values)


def _check_length(name: str, length: int | None) -> None:
    if (refusal := PARAMETERS["max_tokens"].refusal(length)) is not None:
        raise bad_request(name, f"{name}: {refusal}")


def _logit_bias(given: Mapping[str, float]) -> dict[int | str, float]:
    """Biases by token id, and by text: as in llama-server, a key that is no number."""
    bias: dict[int | str, float] = {}
    for token, value in given.items():
        is_id = token.isascii() and token.isdigit() and len(token) <= 10
        bias[int(token) if is_id else token] = value
    if len(bias) != len(given):
        raise bad_request("logit_bias", "logit_bias: a token occurs twice")
    return bias


async def predicted(context: ServerContext, body: GenerationRequest) -> TokenIds | None:
    """The prediction of a request as token ids. Raises RequestError over the limit of a prompt."""
    if body.prediction is None:
        return None
    text, body.prediction = body.prediction.text, None
    return TokenIds(await context.engine.encode(text, add_special_tokens=False, name="prediction"))


async def with_negative(
    context: ServerContext, body: GenerationRequest, asks: Sequence[GenerateAsk]
) -> list[GenerateAsk]:
    """The requests of a body, with its negative prompt where they are guided. Raises ApiError or RequestError."""
    text, given = body.negative_prompt, body.negative_prompt_ids
    body.negative_prompt = body.negative_prompt_ids = None
    if text is not None and given is not None:
        raise bad_request("negative_prompt_ids", "negative_prompt_ids: not together with negative_prompt")
    if given is not None:
        check_token_ids("negative_prompt_ids", given, context.card().vocab_size)
    ids = await context.engine.encode(text, name="negative_prompt") if text else given or ()
    return [replace(ask, request=guided(ask.request, ids)) for ask in asks]


def beams_of(body: GenerationRequest) -> Beams | None:
    """The beam search of a request. Raises ApiError for fields of one without it, and for a stream."""
    given = {
        name: value
        for name in ("length_penalty", "early_stopping")
        if (value := getattr(body, name)) is not None
    }
    if not body.use_beam_search:
        name = next((name for name, value in given.items() if value != getattr(_NO_BEAMS, name)), None)
        name = name or (None if body.beam_width is None else "beam_width")
        if name is not None:
            raise bad_request(name, f"{name}: needs use_beam_search", "unsupported_parameter")
        return None
    if body.stream:
        raise bad_request(
            "stream", "stream: a beam search has no text before its end", "unsupported_parameter"
        )
    if body.temperature not in (None, 0, 1):
        raise bad_request("temperature", "temperature: a beam search draws nothing; leave it out, or 0")
    width = next((w for w in (body.beam_width, getattr(body, "best_of", None), body.n) if w is not None), 1)
    return Beams(width=width, **given)


def priority_of(exchange: Exchange, given: int | None) -> int:
    """The priority of a request: below all others for one in the background. Raises ApiError."""
    priority = given or 0
    if not -(2**31) <= priority < 2**31:
        raise bad_request("priority", f"priority: {priority} is not a 32-bit integer")
    return BACKGROUND if exchange.background else priority


def make_ask(
    context: ServerContext,
    exchange: Exchange,
    body: GenerationRequest,
    params: SamplingParams,
    prompt: TokenIds,
    request_id: str,
    prediction: TokenIds | None = None,
    texts: TextTokens | None = None,
) -> GenerateAsk:
    """One prompt, ready for admission; its times count from the arrival of the request."""
    if context.hooks is not None:
        for name, asked in (
            ("logprobs", params.logprobs is not None),
            ("return_token_ids", body.return_token_ids),
        ):
            if asked:
                message = f"{name}: not with this server's output hook: they would show text that it changes"
                raise bad_request(name, message, "unsupported_parameter")
    scored = params.scored_tokens(len(prompt))
    entries = scored * ((params.prompt_logprobs or 0) + 1)
    if entries > MAX_PROMPT_LOGPROB_ENTRIES:
        raise bad_request(
            "prompt_logprobs",
            f"prompt_logprobs: {entries} entries for {scored} prompt tokens are over the limit of "
            f"{MAX_PROMPT_LOGPROB_ENTRIES}",
        )
    params = _within_cost(params, body.max_cost, len(prompt))
    assert exchange.served is not None, "a route that generates calls generating_model first"
    deadline = _limit(exchange, "deadline_ms", body.deadline_ms)
    queue_deadline = _limit(exchange, "max_queue_ms", body.max_queue_ms)
    priority = priority_of(exchange, body.priority)
    request = Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        arrival=time.monotonic(),
        priority=0 if priority != BACKGROUND and _names_class(context, body) else priority,
        namespace=body.cache_salt or "",
        tenant=context.tenants.domain(exchange.tenant),
        eos_token_ids=context.engine.card.eos_token_ids,
        prediction=prediction,
        beams=beams_of(body),
        texts=texts,
        adapter=exchange.served.digest,
        terms=_terms(context, exchange, body, (deadline, queue_deadline)),
    )
    wants = exchange.header(b"x-quire-predict").lower() in {"1", "true"}
    return GenerateAsk(
        request=with_transfer(context, exchange, body, request),
        tenant=exchange.tenant,
        deadline=deadline,
        queue_deadline=queue_deadline,
        since=exchange.arrival,
        keep_output=False,
        progress=bool(body.return_progress),
        predicted=partial(_tell, exchange) if wants else None,
        accepted=places_for(params.n) if body.return_accepted_drafts else None,
    )


def check_choices(prompts: int, samples: int) -> None:
    """Raise ApiError 400, naming the field, when a request has too many samples over all prompts."""
    if samples * prompts > MAX_CHOICES:
        name = "prompt" if prompts > MAX_CHOICES else "n"
        each = f" with {samples} samples each" if samples > 1 else ""
        message = f"{prompts} prompts{each} are {samples * prompts} choices, over the limit of {MAX_CHOICES}"
        raise bad_request(name, f"{name}: {message}")


def check_token_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    """Raise ApiError 400, naming the field, for an id that is not in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        wrong = next(token for token in ids if not 0 <= token < vocab)
        raise bad_request(name, f"{name}: {wrong} is not a token id below the vocabulary size {vocab}")


def check_logprobs(params: SamplingParams, prompts: Sequence[int], window: int, name: str) -> None:
    """Raise ApiError 400 when prompts of these lengths could get more logprobs than a response may hold."""
    scored = sum(map(params.scored_tokens, prompts))
    entries = scored * ((params.prompt_logprobs or 0) + 1)
    if entries > MAX_LOGPROB_ENTRIES:
        raise bad_request(
            "prompt_logprobs",
            f"prompt_logprobs: {entries} entries for {scored} tokens of {len(prompts)} prompts are over the"
            f" limit of {MAX_LOGPROB_ENTRIES}",
        )
    if params.logprobs is None:
        return
    longest = [min(params.max_tokens or window, window - length) for length in prompts]
    entries = params.n * sum(longest) * (params.logprobs + 1)
    if entries > MAX_LOGPROB_ENTRIES:
        message = (
            f"{name}: up to {entries} entries for {params.n * sum(longest)} tokens are over the limit of"
            f" {MAX_LOGPROB_ENTRIES}; reduce max_tokens or {name}"
        )
        raise bad_request(name, message)


def _terms(
    context: ServerContext, exchange: Exchange, body: GenerationRequest, limits: Sequence[float | None]
) -> ServiceTerms:
    """The class that a request asks for, when it is due, and how long its prefix is kept.

    Raises ApiError 400 for an unknown class, 403 for one that its tenant may not ask for.
    """
    tier = body.service_tier
    tenant, classes = context.tenants.get(exchange.tenant), context.engine.card.service_classes
    names = [one.name for one in classes]
    allowed = [name for name in tenant.classes if name in names]
    if tenant.classes and classes and tier in (None, "auto", "default"):
        tier = allowed[0] if allowed else tier
    found = class_of(tier, classes)
    if found is not None and _names_class(context, body):
        found = max(0, min(len(classes) - 1, found + (body.priority or 0)))
    if found is None or (tier in ("priority", "flex") and not classes):
        known = ", ".join(["auto", "default", *(["priority", "flex"] if classes else []), *names])
        message = f"service_tier: {(tier or '')[:64]!r} is not one of {known}"
        raise bad_request("service_tier", message, "unsupported_parameter")
    if tenant.classes and classes and names[found] not in allowed:
        message = f"service_tier: this tenant may not ask for {names[found]}; {', '.join(allowed) or 'none'} can be had"
        raise ApiError(403, message, code="class_not_allowed", param="service_tier")
    ends = [limit for limit in limits if limit is not None]
    if classes and (ttft := classes[found].slo.ttft):
        ends.append(exchange.arrival + ttft / 1000)
    return ServiceTerms(
        account=exchange.tenant,
        tag=context.tenants.tag(exchange),
        weight=tenant.weight,
        service_class=found,
        due=min(ends, default=None),
        cache_seconds=_kept(body),
    )


def _names_class(context: ServerContext, body: GenerationRequest) -> bool:
    """Whether the priority of a request is that of its class: it has no tier, and no policy goes by priorities."""
    if not body.priority or body.service_tier is not None or not context.engine.card.service_classes:
        return False
    live = context.engine.live
    return not named_policies(live.scheduling_policy, live.slo, live.overtake_ms).levels


def _kept(body: GenerationRequest) -> float:
    """Seconds for which a request asks to keep its prefix."""
    asked = [_SESSION_SECONDS] if body.session_id else []
    if body.prompt_cache_retention == "24h":
        asked.append(86_400.0)
    if body.cache_control is not None:
        asked.append(3_600.0 if body.cache_control.ttl == "1h" else 300.0)
    return max(asked, default=0.0)


def _within_cost(params: SamplingParams, most: float | None, prompt: int) -> SamplingParams:
    """The parameters with the max_tokens that a cost allows. Raises ApiError 400 if it does not allow one."""
    if most is None:
        return params
    room = int((min(most, 2.0**40) - prompt) // 2)
    if room < max(1, params.min_tokens):
        why = f"the {prompt} tokens of the prompt cost 1 each, and a generated one 2"
        raise bad_request("max_cost", f"max_cost: {most:g} does not suffice: {why}")
    return replace(params, max_tokens=room if params.max_tokens is None else min(room, params.max_tokens))


def _tell(exchange: Exchange, seconds: float) -> None:
    """Add the predicted time to the first token to the response."""
    if math.isfinite(seconds):
        exchange.add_headers([(PREDICTED_TTFT, predicted_ttft(seconds))])


def _limit(exchange: Exchange, name: str, milliseconds: float | None) -> float | None:
    if milliseconds is None:
        return None
    if milliseconds <= 0:
        raise ApiError(
            504,
            f"{name}: {milliseconds:g} ms passed before the request was admitted",
            code="deadline_exceeded",
            param=name,
        )
    return exchange.arrival + milliseconds / 1000
