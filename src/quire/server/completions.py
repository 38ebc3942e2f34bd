"""POST /v1/completions: text or token ids, one prompt or many, with echo and logprobs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.context_window import check_window
from quire.engine.api import GenerateAsk, ModelCard, StreamDelta
from quire.engine.front.prompt_embeds import PromptEmbeds, embedded, from_base64
from quire.records import dataclass
from quire.server import fields, pieces
from quire.server.answer_forms import with_form
from quire.server.answering import (
    AnswerStream,
    StreamForm,
    answer_whole,
    check_streaming,
    envelope_fields,
    make_envelope,
    openai_end,
    ping_seconds,
    wants_timings,
    wants_usage,
    with_running_usage,
)
from quire.server.chunks import Chunks, Envelope
from quire.server.context import ServerContext
from quire.server.continuing import with_continuation
from quire.server.draft_marks import DraftMarks, marks_of
from quire.server.errors import bad_request
from quire.server.exchange import Body, Exchange, off_loop
from quire.server.generation import HttpGeneration, finish_reason
from quire.server.logprob_bodies import (
    CompletionLogprobsWriter,
    LogprobEntry,
    TokenTexts,
    completion_pieces,
    prompt_pieces,
)
from quire.server.requests import CompletionRequest, Prompt
from quire.server.responses import Completion, UsageBody
from quire.server.routes import Post
from quire.server.sampling import (
    DEFAULT_COMPLETION_TOKENS,
    beams_of,
    check_choices,
    check_logprobs,
    check_token_ids,
    completion_params,
    make_ask,
    predicted,
    scores_only,
    with_negative,
)
from quire.server.scaled_adapters import served_with
from quire.server.structured import find_structure, with_grammar
from quire.server.transfers import answer_prefill, is_prefill
from quire.text.infill import InfillAsk
from quire.types import FinishReason, SamplingParams, TokenIds


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """One prompt that is continued as it is; `text` is "" unless it will be echoed. `stop_ids` end its answer, too."""

    token_ids: TokenIds
    text: str
    stop_ids: tuple[int, ...] = ()
    embeds: PromptEmbeds | None = None


class PreparedCompletion(NamedTuple):
    """Prompts ready for admission, and the keywords of lenient schemas that are not enforced."""

    asks: list[GenerateAsk]
    prompts: list[RawPrompt]
    dropped: tuple[str, ...]


async def prepare_completion(
    context: ServerContext,
    exchange: Exchange,
    read: Body[CompletionRequest],
    request_id: str,
    *,
    length: int | None = DEFAULT_COMPLETION_TOKENS,
) -> PreparedCompletion:
    """Check a request, tokenize its prompts, and compile the grammar of their answers, which have `length` tokens where
    it asks for none; None: to the end of the context. Raises ApiError or RequestError naming the field.
    """
    card, body = context.card(), read.value
    beams = beams_of(body)
    params = await off_loop(read.size, lambda: completion_params(body, card.default_sampling, length))
    structure = None if scores_only(body) else await off_loop(read.size, lambda: find_structure(body))
    samples = params.n if beams is None else max(params.n, beams.width)
    if body.prompt_embeds is not None:
        prompts = await off_loop(read.size, lambda: _embedded_prompts(body, card, samples))
    else:
        prompts = await _prompts(
            context, exchange, body, *await off_loop(read.size, lambda: _split(body.prompt, card, samples))
        )
    body.prompt = body.suffix = body.prompt_embeds = None
    for prompt in prompts:
        check_window(len(prompt.token_ids), body.max_tokens, card.max_model_len, "prompt")
    check_logprobs(params, [len(prompt.token_ids) for prompt in prompts], card.max_model_len, "logprobs")
    prediction = await predicted(context, body)
    named = await context.engine.text_tokens(params) if params.has_texts else None
    asks = [
        make_ask(
            context,
            exchange,
            body,
            _within(params, prompt, card),
            prompt.token_ids,
            f"{request_id}-{i}" if i else request_id,
            prediction,
            named,
        )
        for i, prompt in enumerate(prompts)
    ]
    if is_prefill(body):
        return PreparedCompletion(asks, prompts, ())
    asks = await with_negative(context, body, asks)
    asks = [
        ask if prompt.embeds is None else replace(ask, request=embedded(ask.request, prompt.embeds))
        for ask, prompt in zip(asks, prompts, strict=True)
    ]
    dropped: tuple[str, ...] = ()
    if params.thinking_token_budget is not None:
        forms = [await with_form(context, exchange, ask, None, structure, divided=False) for ask in asks]
        asks, dropped = [ask for ask, _ in forms], forms[0][1]
    elif structure is not None:
        asks, dropped = await with_grammar(context, exchange, asks, structure)
    return PreparedCompletion(asks, prompts, dropped)


async def completions(context: ServerContext, exchange: Exchange, read: Body[CompletionRequest]) -> None:
    """Continue prompts, whole or as a stream."""
    context.card()
    body = read.value
    served = await served_with(context, exchange, body.model, body.lora)
    envelope = make_envelope(context, served, body, "cmpl")
    _check_stream(body)
    asks, prompts, dropped = await prepare_completion(context, exchange, read, envelope.id)
    if is_prefill(body):
        await answer_prefill(context, exchange, asks)
        return
    texts = context.texts_as_ids if body.return_tokens_as_token_ids else context.texts
    if not body.stream:
        timings = wants_timings(exchange, body)
        marks = marks_of(asks)
        answer = _Answer(context, body, envelope, texts, marks, timings=timings, dropped=dropped)
        await answer_whole(context, exchange, asks, lambda run: answer.whole(run, prompts))
        return
    samples = asks[0].request.params.n
    count = samples * len(prompts)
    chunks = Chunks(envelope, count, chat=False, usage=wants_usage(context, body), dropped=dropped)
    writers = [CompletionLogprobsWriter(texts) for _ in range(count)]
    echoes = {i: prompts[i // samples].text for i in range(count)} if body.echo else {}
    ids, end = bool(body.return_token_ids), openai_end(context, exchange, body, chunks)
    marks, scored = marks_of(asks), asks[0].request.params.logprobs is not None
    whole = ids or marks is not None

    def chunk_of(choice: int, delta: StreamDelta) -> bytes:
        echo = echoes.pop(choice, "")
        head = chunks.text(choice, echo) if echo else b""
        if scored and delta.logprobs is None:
            writers[choice].skip(delta.token_ids)
        if delta.logprobs is None and delta.finish_reason is None and not whole:
            return head + (chunks.text(choice, delta.text) if delta.text else b"")
        logprobs = None if delta.logprobs is None else writers[choice].push(delta.token_ids, delta.logprobs)
        drafts = None if marks is None else marks.of_next(choice, len(delta.token_ids))
        return head + chunks.full(choice, delta, logprobs, ids=ids, marks=drafts)

    shape = StreamForm(chunk_of, end, around=chunks.around, whole=whole, progress=chunks.progress)
    shape = with_running_usage(context, body, shape)
    asks, shape = with_continuation(context, exchange, body, asks, shape)
    await AnswerStream(context, exchange, shape, ping_seconds=ping_seconds(body)).write(asks)


def _check_stream(body: CompletionRequest) -> None:
    """Raise ApiError for what cannot be streamed, and for what cannot be filled in."""
    check_streaming(body)
    if body.suffix and body.echo:
        raise bad_request("echo", "echo: not supported with suffix", "unsupported_parameter")
    given = body.prompt or ""
    if body.suffix and not isinstance(given, str) and not all(type(one) is str for one in given):
        raise bad_request("suffix", "suffix: needs a prompt of text, not token ids", "unsupported_parameter")
    if body.stream and body.echo and body.logprobs is not None:
        raise bad_request("echo", "echo: not supported with logprobs in a stream", "unsupported_parameter")
    if body.stream and scores_only(body):
        raise bad_request(
            "stream", "stream: nothing to stream, because max_tokens is 0", "unsupported_parameter"
        )


async def _prompts(
    context: ServerContext,
    exchange: Exchange,
    body: CompletionRequest,
    texts: list[str],
    id_lists: list[list[int]],
) -> list[RawPrompt]:
    """The prompts as token ids. Raises ApiError or RequestError for an invalid one."""
    engine = context.engine
    special = True if body.add_special_tokens is None else body.add_special_tokens

    async def encode(text: str) -> RawPrompt:
        if body.suffix:
            asked = InfillAsk(prefix=text, suffix=body.suffix, add_special_tokens=special)
            made = await engine.encode_infill(asked)
            return RawPrompt(TokenIds(made.token_ids), "", made.stop_ids)
        ids = TokenIds(await engine.encode(text, add_special_tokens=special))
        return RawPrompt(ids, text if body.echo else "")

    found = await asyncio.gather(*map(encode, texts))
    if not all(prompt.token_ids for prompt in found):
        raise bad_request("prompt", "prompt: has no tokens")
    for ids in id_lists:
        if body.echo:
            context.memory.take_echo(exchange.held, len(ids))
        found.append(RawPrompt(TokenIds(ids), await engine.decode(ids) if body.echo else ""))
    return found


def _embedded_prompts(body: CompletionRequest, card: ModelCard, samples: int) -> list[RawPrompt]:
    """The prompts of a request that are rows of embeddings. Raises ApiError or RequestError."""
    given = body.prompt_embeds
    payloads = [given] if isinstance(given, str) else given or []
    for name, asked in (("prompt", body.prompt), ("suffix", body.suffix), ("echo", body.echo)):
        if asked:
            raise bad_request(name, f"{name}: not supported with prompt_embeds", "unsupported_parameter")
    if not payloads:
        raise bad_request("prompt_embeds", "prompt_embeds: is empty")
    check_choices(len(payloads), samples)
    found = [from_base64(payload, card.embed_dim, card.max_model_len - 1) for payload in payloads]
    return [RawPrompt(TokenIds(embeds), "", (), embeds) for embeds in found]


def _split(prompt: Prompt | None, card: ModelCard, samples: int) -> tuple[list[str], list[list[int]]]:
    """The prompts of a request: either texts or lists of ids. Raises ApiError; lengths are checked first."""
    if prompt is None:
        raise bad_request("prompt", "prompt: is missing", "invalid_type")
    if isinstance(prompt, str):
        return [prompt], []
    if prompt and type(prompt[0]) is int:
        check_window(len(prompt), None, card.max_model_len, "prompt")
    else:
        check_choices(len(prompt), samples)
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return prompt, []  # type: ignore[return-value]
    if kinds == {int}:
        prompt, kinds = [prompt], {list}  # type: ignore[list-item]
    if kinds != {list}:
        what = "is empty" if not kinds else "mixes strings, token ids and lists"
        raise bad_request("prompt", f"prompt: {what}; expected a string, token ids, or a list of either")
    for ids in prompt:
        _check_ids(ids, card)  # type: ignore[arg-type]
    return [], prompt  # type: ignore[return-value]


def _check_ids(ids: list[int], card: ModelCard) -> None:
    if not ids:
        raise bad_request("prompt", "prompt: has no tokens")
    check_window(len(ids), None, card.max_model_len, "prompt")
    check_token_ids("prompt", ids, card.vocab_size)


def _within(params: SamplingParams, prompt: RawPrompt, card: ModelCard) -> SamplingParams:
    """Parameters that let an answer without a requested length run to the end of the context, and end at the tokens of
    its prompt."""
    if prompt.stop_ids and not params.ignore_eos:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *prompt.stop_ids))
    rest = card.max_model_len - len(prompt.token_ids)
    return params if (params.max_tokens or 0) <= rest else replace(params, max_tokens=rest)


class _Answer:
    """Makes an answer that is not streamed."""

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        envelope: Envelope,
        texts: TokenTexts,
        marks: DraftMarks | None,
        *,
        timings: bool,
        dropped: Sequence[str],
    ) -> None:
        self._context, self._body, self._envelope, self._texts = context, body, envelope, texts
        self._marks = marks
        self._timings, self._dropped = timings, dropped
        self._scores_only = scores_only(body)

    def whole(self, run: HttpGeneration, prompts: list[RawPrompt]) -> Iterator[bytes]:
        """The JSON of a responses.Completion."""
        choices = pieces.items(
            self._choice(run, position, index, prompts[index // run.samples])
            for position, index in enumerate(self._best(run))
        )
        usage = run.usage()
        if self._scores_only:
            usage = UsageBody(usage.prompt_tokens, 0, usage.prompt_tokens, usage.prompt_tokens_details)
        rest = [("usage", pieces.value(usage))]
        if self._timings:
            rest.append(("timings", pieces.value(run.timings())))
        if self._dropped:
            rest.append(("dropped_keywords", pieces.value(self._dropped)))
        return pieces.fields([*envelope_fields(self._envelope), ("choices", choices), *rest])

    def _best(self, run: HttpGeneration) -> Sequence[int]:
        """The samples to return: all, or those of each prompt with the highest mean log-probability."""
        wanted = self._body.n or 1
        if run.samples == wanted:
            return range(run.choices)
        means = [answer.logprobs.mean() if answer.logprobs else 0.0 for answer in run.answers]
        groups = (range(first, first + run.samples) for first in range(0, run.choices, run.samples))
        return [i for group in groups for i in sorted(group, key=means.__getitem__, reverse=True)[:wanted]]

    def _choice(self, run: HttpGeneration, position: int, index: int, prompt: RawPrompt) -> pieces.Pieces:
        """The JSON of a responses.CompletionChoice."""
        body, (p, s) = self._body, divmod(index, run.samples)
        sample = run.outputs[p].outputs[s]
        text = b"" if self._scores_only else run.answers[index].text
        reason = FinishReason.LENGTH if self._scores_only else sample.finish_reason
        found: list[tuple[str, pieces.Pieces]] = [
            ("index", pieces.value(position)),
            ("text", pieces.text(prompt.text.encode(), text) if body.echo else pieces.text(text)),
            ("logprobs", self._logprobs(run, index, prompt)),
            ("finish_reason", pieces.value(finish_reason(reason))),
            ("stop_reason", pieces.value(None if self._scores_only else sample.stop_reason)),
        ]
        if body.prompt_logprobs is not None:
            positions = run.prompt_logprobs(p), run.unscored(p)
            found.append(("prompt_logprobs", prompt_pieces(*positions, self._context.engine)))
        if body.return_token_ids:
            found.append(("token_ids", pieces.numbers([] if self._scores_only else sample.token_ids)))
            found.append(("prompt_token_ids", pieces.numbers(prompt.token_ids)))
        if self._marks is not None:
            count = 0 if self._scores_only else len(sample.token_ids)
            found.append(("accepted_drafts", pieces.numbers(self._marks.of_all(index, count))))
        return pieces.fields(found)

    def _logprobs(self, run: HttpGeneration, index: int, prompt: RawPrompt) -> pieces.Pieces:
        table, (p, s) = run.answers[index].logprobs, divmod(index, run.samples)
        if table is None or self._body.logprobs is None:
            return pieces.value(None)
        generated = [] if self._scores_only else run.outputs[p].outputs[s].token_ids
        before = run.prompt_logprobs(p) if self._body.echo else None
        width = max(pieces.width_of(table), pieces.width_of(before or table))

        def entries() -> Iterator[LogprobEntry]:
            unscored = itertools.repeat(None, run.unscored(p))
            echoed = (
                ()
                if before is None
                else zip(prompt.token_ids, itertools.chain(unscored, before), strict=True)
            )
            return itertools.chain(echoed, zip(generated, table, strict=False))

        return completion_pieces(entries, width, self._texts)


ROUTES = (
    Post(
        path="/v1/completions", summary="Continue prompts", tag="generation", handler=completions,
        request=CompletionRequest, response=Completion, chunk=Completion, refused=fields.COMPLETION,
    ),
)  # fmt: skip
