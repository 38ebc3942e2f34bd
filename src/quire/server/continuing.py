"""Streams that another server may have to go on with: a router learns their token ids, and gives them back.

See quire.routing.continued for what is said. Penalties, stop strings and grammars have no other state than the output
so far: the engine goes on behind it as behind a preemption, and its text is read again from the first token on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import msgspec

from quire.engine.api import GenerateAsk, StreamDelta
from quire.routing.continued import FIELD, STREAM, ids_event, is_resume_code, is_stream_proof, unpacked
from quire.routing.tickets import kept_key
from quire.server.answering import StreamForm
from quire.server.context import ServerContext
from quire.server.errors import ApiError
from quire.server.exchange import ChunkPiece, Exchange
from quire.server.requests import GenerationRequest
from quire.types import TokenIds

_encode = msgspec.json.Encoder().encode


def _key(context: ServerContext) -> bytes:
    """The key that this server and its router have: of its own, or that of its server of blocks, with which the engine
    has started; empty without one."""
    shared = context.engine.card.peers[1]
    return context.router_key or (kept_key(shared) if shared else b"")


def with_continuation(
    context: ServerContext, exchange: Exchange, body: GenerationRequest, asks: list[GenerateAsk], form: StreamForm
) -> tuple[list[GenerateAsk], StreamForm]:  # fmt: skip
    """The prompts of a stream, behind the output that a router has of it, and its form, which names the ids to come to
    a router that wants to know. Raises ApiError for an output from anybody else, or from another engine.
    """
    shown, resumed = exchange.header(STREAM.encode()), body.resumed_output
    if not shown and resumed is None:
        return asks, form
    key, name = _key(context), exchange.header(b"x-request-id")
    if not key or not is_stream_proof(key, name, shown):
        if resumed is None:
            return asks, form
        raise _refusal("only a router that has the key of this server goes on with streams")
    if not _may_go_on(context, asks):
        if resumed is None:
            return asks, form
        raise _refusal("this request is not one that another server can go on with")
    (ask,) = asks
    mark = _mark(context, exchange, ask)
    if resumed is not None:
        if not is_resume_code(key, name, resumed.mark, resumed.ids, resumed.code):
            raise _refusal("its code is not that of the router")
        outputs = unpacked(resumed.ids)
        if outputs is None or len(outputs) != ask.request.params.n or not any(outputs):
            raise _refusal("there are no ids of each sample in it")
        if resumed.mark != mark:
            raise ApiError(
                409, f"{FIELD}: it comes from another engine or model", code="other_engine", param=FIELD
            )
        ask = replace(ask, request=replace(ask.request, given=tuple(map(TokenIds, outputs))))
    exchange.add_headers([(STREAM.encode(), mark.encode())])
    return [ask], _with_ids(form)


def _refusal(why: str) -> ApiError:
    return ApiError(400, f"{FIELD}: {why}", code="unsupported_parameter", param=FIELD)


def _may_go_on(context: ServerContext, asks: Sequence[GenerateAsk]) -> bool:
    """Whether ids are all the state of an output, and its events can be told from its text."""
    request, params = asks[0].request, asks[0].request.params
    plain = len(asks) == 1 and request.beams is None and request.negative_prompt is None
    drawn = params.temperature == 0 or params.seed is not None
    beside = (
        params.mirostat or params.prompt_logprobs is not None
        or asks[0].accepted is not None or context.hooks is not None
    )  # fmt: skip
    card = context.engine.card
    return plain and drawn and not beside and card.acceptance == "same" and bool(card.bits)


def _mark(context: ServerContext, exchange: Exchange, ask: GenerateAsk) -> str:
    """What stands for all that determines the output of a request."""
    card, request, config = context.engine.card, ask.request, context.config
    assert exchange.served is not None
    parts = (
        card.bits, exchange.served.fingerprint(card), request.params, request.eos_token_ids, request.texts,
        request.soft_tokens, None if request.grammar is None else request.grammar.digest, request.regions,
        config.reasoning_parser, config.tool_call_parser,
    )  # fmt: skip
    mark = blake2b("\0".join(map(repr, parts)).encode("utf-8", "surrogatepass"), digest_size=16)
    mark.update(blake2b(request.prompt_embeds).digest())
    mark.update(request.prompt_token_ids.tobytes())
    return mark.hexdigest()


def _with_ids(form: StreamForm) -> StreamForm:
    """A form whose events are followed by the ids of their tokens."""

    def chunk_of(choice: int, delta: StreamDelta) -> bytes:
        data = form.chunk_of(choice, delta)
        return data + ids_event(delta.token_ids, choice) if delta.token_ids else data

    def token_of(
        choice: int, text: str, token: int, logprob: float | None
    ) -> tuple[ChunkPiece, ChunkPiece, ChunkPiece] | None:
        if not text or logprob is not None or form.whole or form.around is None:
            return None
        opening, closing = form.around(choice)
        return opening, _encode(text), closing + ids_event((token,), choice)

    return replace(form, chunk_of=chunk_of, token_of=token_of, whole=True)
