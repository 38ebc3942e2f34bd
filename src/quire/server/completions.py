"""POST /v1/completions: text or token ids, one prompt or many, with echo and logprobs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import msgspec
from msgspec import UNSET

from quire.engine.api import ModelCard, StreamDelta
from quire.server import fields
from quire.server.answering import (
    EventStream,
    check_streaming,
    make_envelope,
    optional,
    read_body,
    run_whole,
    wants_timings,
    wants_usage,
)
from quire.server.chunks import Chunks, Envelope
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Exchange, off_loop
from quire.server.generation import Run, finish_reason
from quire.server.logprobs import CompletionLogprobsWriter, TokenTexts, joined, prompt_logprobs
from quire.server.requests import CompletionRequest, Prompt
from quire.server.responses import Completion, CompletionChoice, CompletionLogprobs
from quire.server.sampling import check_logprobs, completion_params, make_ask
from quire.types import CompletionOutput, RequestOutput, SamplingParams, check_window

MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt; `text` is "" unless it is to be echoed."""

    token_ids: list[int]
    text: str


async def completions(context: ServerContext, exchange: Exchange) -> None:
    """Continue prompts, whole or as a stream."""
    card = context.card()
    read = await read_body(context, exchange, CompletionRequest, fields.COMPLETION)
    body = read.value
    envelope = make_envelope(context, exchange, body, "cmpl")
    check_streaming(body)
    if body.stream and body.echo and body.logprobs is not None:
        raise bad_request("echo", "echo: with logprobs, not supported in a stream", "unsupported_parameter")
    params = await off_loop(len(read.raw), lambda: completion_params(body, card.default_sampling))
    split = await off_loop(len(read.raw), lambda: _split(body.prompt, card))
    prompts = await _prompts(context, body, *split)
    for prompt in prompts:
        check_window(len(prompt.token_ids), body.max_tokens, card.max_model_len, "prompt")
    check_logprobs(params, [len(prompt.token_ids) for prompt in prompts], card.max_model_len, "logprobs")
    asks = [
        make_ask(
            exchange, body, _within(params, prompt, card), prompt.token_ids,
            f"{envelope.id}-{i}" if i else envelope.id,
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    texts = TokenTexts(context.engine, as_ids=bool(body.return_tokens_as_token_ids))
    if not body.stream:
        run = await run_whole(context, exchange, asks)

        def encode() -> bytes:
            answer = _Answer(context, body, envelope, texts).whole(run, prompts)
            if wants_timings(exchange, body):
                answer.timings = run.timings()
            return msgspec.json.encode(answer)

        await exchange.respond(200, await off_loop(run.answer_size(), encode))
        return
    count = params.n * len(prompts)
    chunks = Chunks(envelope, count, chat=False, usage=wants_usage(context, body))
    writers = [CompletionLogprobsWriter(texts) for _ in range(count)]
    echoes = {i: prompts[i // params.n].text for i in range(count)} if body.echo else {}
    ids = bool(body.return_token_ids)

    def chunk_of(choice: int, delta: StreamDelta) -> bytes:
        echo = echoes.pop(choice, "")
        head = chunks.text(choice, echo) if echo else b""
        if delta.logprobs is None and delta.finish_reason is None and not ids:
            return head + (chunks.text(choice, delta.text) if delta.text else b"")
        logprobs = None if delta.logprobs is None else writers[choice].push(delta.token_ids, delta.logprobs)
        return head + chunks.full(choice, delta, logprobs, ids=ids)

    await EventStream(context, exchange, body, chunks).write(asks, chunk_of)


async def _prompts(
    context: ServerContext, body: CompletionRequest, texts: list[str], id_lists: list[list[int]]
) -> list[_Prompt]:
    """The prompts in token ids. Raises ApiError or RequestError for one that cannot be."""
    engine = context.engine
    special = True if body.add_special_tokens is None else body.add_special_tokens
    encoded = await asyncio.gather(*(engine.encode(text, add_special_tokens=special) for text in texts))
    found = list(map(_Prompt, encoded, texts))
    if not all(encoded):
        raise bad_request("prompt", "prompt: has no tokens")
    found += [_Prompt(ids, await engine.decode(ids) if body.echo else "") for ids in id_lists]
    return found


def _split(prompt: Prompt, card: ModelCard) -> tuple[list[str], list[list[int]]]:
    """The prompts of a request: either texts or lists of ids. Raises ApiError; lengths are looked at first."""
    if isinstance(prompt, str):
        return [prompt], []
    if prompt and type(prompt[0]) is int:
        check_window(len(prompt), None, card.max_model_len, "prompt")
    elif len(prompt) > MAX_PROMPTS:
        raise bad_request("prompt", f"prompt: {len(prompt)} prompts are over the limit of {MAX_PROMPTS}")
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return prompt, []  # type: ignore[return-value]
    if kinds == {int}:
        prompt, kinds = [prompt], {list}  # type: ignore[list-item]
    if kinds != {list}:
        what = "is empty" if not kinds else "mixes texts, token ids and lists"
        raise bad_request(
            "prompt", f"prompt: {what}; it must be a text, texts, token ids or lists of token ids"
        )
    for ids in prompt:
        _check_ids(ids, card)  # type: ignore[arg-type]
    return [], prompt  # type: ignore[return-value]


def _check_ids(ids: list[int], card: ModelCard) -> None:
    if not ids:
        raise bad_request("prompt", "prompt: has no tokens")
    check_window(len(ids), None, card.max_model_len, "prompt")
    if min(ids) < 0 or max(ids) >= card.vocab_size:
        wrong = next(token for token in ids if not 0 <= token < card.vocab_size)
        message = f"prompt: {wrong} is not a token id below the vocabulary size {card.vocab_size}"
        raise bad_request("prompt", message)


def _within(params: SamplingParams, prompt: _Prompt, card: ModelCard) -> SamplingParams:
    """A length that was not asked for ends with the context."""
    rest = card.max_model_len - len(prompt.token_ids)
    return params if (params.max_tokens or 0) <= rest else replace(params, max_tokens=rest)


class _Answer:
    """Makes the answer that does not stream."""

    def __init__(
        self, context: ServerContext, body: CompletionRequest, envelope: Envelope, texts: TokenTexts
    ) -> None:
        self._context, self._body, self._envelope, self._texts = context, body, envelope, texts

    def whole(self, run: Run, prompts: list[_Prompt]) -> Completion:
        choices = []
        for p, (output, prompt) in enumerate(zip(run.outputs, prompts, strict=True)):
            choices += [self._choice(p * run.samples + s.index, output, s, prompt) for s in output.outputs]
        envelope = self._envelope
        return Completion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            system_fingerprint=envelope.system_fingerprint,
            choices=choices,
            usage=run.usage(),
        )

    def _choice(
        self, index: int, output: RequestOutput, sample: CompletionOutput, prompt: _Prompt
    ) -> CompletionChoice:
        body = self._body
        ids = bool(body.return_token_ids)
        asked = body.prompt_logprobs is not None and output.prompt_logprobs is not None
        return CompletionChoice(
            index=index,
            text=prompt.text + sample.text if body.echo else sample.text,
            logprobs=self._logprobs(output, sample),
            finish_reason=finish_reason(sample.finish_reason),
            stop_reason=sample.stop_reason,
            prompt_logprobs=optional(
                prompt_logprobs(output.prompt_logprobs or [], self._context.engine) if asked else None
            ),
            token_ids=sample.token_ids if ids else UNSET,
            prompt_token_ids=output.prompt_token_ids if ids else UNSET,
        )

    def _logprobs(self, output: RequestOutput, sample: CompletionOutput) -> CompletionLogprobs | None:
        if sample.logprobs is None:
            return None
        writer = CompletionLogprobsWriter(self._texts)
        if not self._body.echo or output.prompt_logprobs is None:
            return writer.push(sample.token_ids, sample.logprobs)
        prompt = writer.prompt(output.prompt_token_ids, output.prompt_logprobs)
        return joined(prompt, writer.push(sample.token_ids, sample.logprobs))
