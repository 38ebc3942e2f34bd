"""Requests that a router divides between two servers: one computes the prompt, another one answers.

    router ── do_remote_decode ──▶ prefill server ── blocks ──▶ kv-server
       ◀── kv_transfer_params with a ticket ──┘                     │
       └── do_remote_prefill, the ticket ──▶ decode server ◀── blocks

The fields are vLLM's. Only those who prove that they have the servers' key may use them. A ticket that is not one for
this very request counts for nothing: the prompt is computed here, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from quire.core.tier import space_of
from quire.engine.api import GenerateAsk
from quire.routing.tickets import PEER, TICKET, blocks_of, is_peer, kept_key, prompt_mark, ticket_for
from quire.server.answering import answer_whole
from quire.server.context import ServerContext
from quire.server.errors import ApiError
from quire.server.exchange import Exchange
from quire.server.generation import HttpGeneration
from quire.server.requests import GenerationRequest, KvTransferParams
from quire.server.responses import UsageBody
from quire.types import Request, SamplingParams

_NAME = "kv_transfer_params"
_REFUSED = (TICKET.encode(), b"refused")


class PrefillAnswer(msgspec.Struct, kw_only=True):
    """What a server answers that computed a prompt for another one; null: it computed nothing, for there is no whole
    block to send, or nowhere to send it to."""

    kv_transfer_params: KvTransferParams | None
    usage: UsageBody | msgspec.UnsetType = msgspec.UNSET


def is_prefill(body: GenerationRequest) -> bool:
    """Whether only the prompt of a request is to be computed."""
    return body.kv_transfer_params is not None and bool(body.kv_transfer_params.do_remote_decode)


def with_transfer(
    context: ServerContext, exchange: Exchange, body: GenerationRequest, request: Request
) -> Request:
    """A request with what its kv_transfer_params ask for. Raises ApiError 400 for those of anybody but a router that
    has the key, and for a role that the server has not.
    """
    asked = body.kv_transfer_params
    if asked is None or not (asked.do_remote_decode or asked.do_remote_prefill):
        return request
    role, key = _peer(context, exchange)
    if asked.do_remote_decode:
        if role == "decode":
            raise _refusal("this server computes no prompts for others")
        terms = replace(request.terms, sent=True)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        return replace(
            request, params=params, prediction=None, beams=None, texts=None, terms=terms
        )  # its token is dropped
    blocks = blocks_of(key, _mark(context, request), asked.remote_request_id or "")
    if blocks is None:
        context.metrics.refused_tickets += 1
        exchange.add_headers([_REFUSED])
        return request
    return replace(request, terms=replace(request.terms, coming=blocks))


async def answer_prefill(context: ServerContext, exchange: Exchange, asks: list[GenerateAsk]) -> None:
    """Compute a prompt, and answer with its ticket. Blocks are on their way before. If there can be none, nothing is
    computed: the server that answers would have to do it again."""
    request = asks[0].request
    block = context.engine.card.cache_block
    blocks = (len(request.prompt_token_ids) - 1) // block if block and not request.prompt_embeds else 0
    if not blocks or len(asks) > 1 or context.engine.stats.remote_tier.get("failed"):
        await exchange.respond(200, msgspec.json.encode(PrefillAnswer(kv_transfer_params=None)))
        return
    _, key = _peer(context, exchange)
    ticket = ticket_for(key, _mark(context, request), blocks)
    made = KvTransferParams(do_remote_prefill=True, do_remote_decode=False, remote_request_id=ticket)

    def pieces_of(run: HttpGeneration) -> Iterator[bytes]:
        yield msgspec.json.encode(PrefillAnswer(kv_transfer_params=made, usage=run.usage()))

    await answer_whole(context, exchange, asks, pieces_of)


def _peer(context: ServerContext, exchange: Exchange) -> tuple[str, bytes]:
    """The server's role, and its key, which the sender of a request has shown to have. Raises ApiError."""
    role, path, _ = context.engine.card.peers
    if role:
        key = kept_key(path)
        if is_peer(key, exchange.header(b"x-request-id"), exchange.header(PEER.encode())):
            return role, key
    exchange.add_headers([_REFUSED])
    raise _refusal("only a router that has the key of this server's --kv-tiers divides requests")


def _refusal(why: str) -> ApiError:
    return ApiError(400, f"{_NAME}: {why}", code="unsupported_parameter", param=_NAME)


def _mark(context: ServerContext, request: Request) -> bytes:
    """What names the blocks of a prompt: a server that would give them other names refuses the ticket."""
    space, tokens = space_of(request.adapter, request.namespace), request.prompt_token_ids.tobytes()
    return prompt_mark(context.engine.card.peers[2], request.tenant, space, tokens)
