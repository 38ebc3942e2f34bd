"""POST /tokenize and /detokenize."""

from __future__ import annotations

import msgspec

from quire.server import fields
from quire.server.answering import read_body
from quire.server.chat import chat_ask
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Exchange
from quire.server.requests import DetokenizeRequest, TokenizeRequest
from quire.server.responses import DetokenizeResponse, TokenizeResponse


async def tokenize(context: ServerContext, exchange: Exchange) -> None:
    """Token ids of a text or a conversation."""
    card = context.card()
    body = (await read_body(context, exchange, TokenizeRequest, fields.TOKENIZE)).value
    context.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "prompt: give either prompt or messages")
    if body.messages is not None:
        ids = await context.engine.encode_chat(chat_ask(body, body.messages))
    else:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = await context.engine.encode(body.prompt or "", add_special_tokens=special)
    pieces = context.engine.pieces(ids) if body.return_token_strs else None
    answer = TokenizeResponse(count=len(ids), max_model_len=card.max_model_len, tokens=ids, token_strs=pieces)
    await exchange.respond(200, msgspec.json.encode(answer))


async def detokenize(context: ServerContext, exchange: Exchange) -> None:
    """Text of token ids."""
    card = context.card()
    body = (await read_body(context, exchange, DetokenizeRequest, fields.DETOKENIZE)).value
    context.model(body.model)
    tokens = body.tokens
    if len(tokens) > card.max_model_len:
        message = f"tokens: {len(tokens)} tokens are over max_model_len {card.max_model_len}"
        raise bad_request("tokens", message)
    if tokens and not 0 <= min(tokens) <= max(tokens) < card.vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < card.vocab_size)
        message = f"tokens: {wrong} is not a token id below the vocabulary size {card.vocab_size}"
        raise bad_request("tokens", message)
    text = await context.engine.decode(tokens, skip_special_tokens=bool(body.skip_special_tokens))
    await exchange.respond(200, msgspec.json.encode(DetokenizeResponse(prompt=text)))
