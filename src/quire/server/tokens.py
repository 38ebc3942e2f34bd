"""POST /tokenize and /detokenize."""

from __future__ import annotations

import msgspec

from quire.server import fields
from quire.server.chat import chat_ask
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Body, Exchange
from quire.server.requests import IdList, Messages, Tools, Variables
from quire.server.routes import Post
from quire.server.sampling import check_token_ids
from quire.text.tools import read_tools


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages as in a chat request."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: IdList
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """Text of token ids."""

    prompt: str


async def tokenize(context: ServerContext, _: Exchange, read: Body[TokenizeRequest]) -> TokenizeResponse:
    """Token ids of a text or a conversation."""
    card, body = context.card(), read.value
    context.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "prompt: set exactly one of prompt and messages")
    if body.messages is not None:
        ids = await context.engine.encode_chat(chat_ask(body, body.messages, read_tools(body.tools)))
    else:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = await context.engine.encode(body.prompt or "", add_special_tokens=special)
    pieces = context.engine.pieces(ids) if body.return_token_strs else None
    return TokenizeResponse(count=len(ids), max_model_len=card.max_model_len, tokens=ids, token_strs=pieces)


async def detokenize(
    context: ServerContext, _: Exchange, read: Body[DetokenizeRequest]
) -> DetokenizeResponse:
    """Text of token ids."""
    card, body = context.card(), read.value
    context.model(body.model)
    tokens = body.tokens
    if len(tokens) > card.max_model_len:
        message = f"tokens: {len(tokens)} tokens exceed max_model_len {card.max_model_len}"
        raise bad_request("tokens", message)
    check_token_ids("tokens", tokens, card.vocab_size)
    text = await context.engine.decode(tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return DetokenizeResponse(prompt=text)


ROUTES = (
    Post(
        path="/tokenize", summary="Token ids of a text or conversation", tag="tokens", handler=tokenize,
        request=TokenizeRequest, response=TokenizeResponse, refused=fields.CONVERSATION,
    ),
    Post(
        path="/detokenize", summary="Text of token ids", tag="tokens", handler=detokenize,
        request=DetokenizeRequest, response=DetokenizeResponse,
    ),
)  # fmt: skip
