"""POST /tokenize and /detokenize, with the fields of vLLM and of llama-server: the field with the text says whose."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from quire.server import fields
from quire.server.chat import chat_ask
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Body, Exchange
from quire.server.requests import IdList, Messages, Tools, Variables
from quire.server.routes import Get, Post
from quire.server.sampling import check_token_ids
from quire.text.tools import read_tools

_CONTENT_OPTIONS = ("add_special", "parse_special", "with_pieces")
_PROMPT_OPTIONS = (
    "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools",
    "return_token_strs",
)  # fmt: skip


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages as in a chat request; or llama-server's content, to which the last
    three fields belong.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class TokenPiece(msgspec.Struct):
    """A token and its text, or its bytes where these are no text."""

    id: int
    piece: str | list[int]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids of a text; of llama-server's content these alone, with their texts if it asks for them."""

    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    tokens: Sequence[int | TokenPiece]
    token_strs: list[str] | UnsetType | None = UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: IdList
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """Text of token ids, by vLLM's name and by llama-server's."""

    prompt: str
    content: str


async def tokenize(
    context: ServerContext, exchange: Exchange, read: Body[TokenizeRequest]
) -> TokenizeResponse:
    """Token ids of a text or a conversation."""
    card, body = context.card(), read.value
    context.model(body.model, exchange)
    if sum(given is not None for given in (body.prompt, body.messages, body.content)) != 1:
        raise bad_request("prompt", "prompt: set exactly one of prompt, messages and content")
    _check_names(body)
    if body.content is not None:
        return await _tokenize_content(context, body, body.content)
    if body.messages is not None:
        ids = await context.engine.encode_chat(chat_ask(body, body.messages, read_tools(body.tools)))
    else:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = await context.engine.encode(body.prompt or "", add_special_tokens=special)
    pieces = context.engine.pieces(ids) if body.return_token_strs else None
    return TokenizeResponse(count=len(ids), max_model_len=card.max_model_len, tokens=ids, token_strs=pieces)


def _check_names(body: TokenizeRequest) -> None:
    """Raise ApiError for an option of the other kind of text."""
    own, others = _CONTENT_OPTIONS, _PROMPT_OPTIONS
    wrong, needs = (own, "content") if body.content is None else (others, "prompt")
    for name in wrong:
        if getattr(body, name) is not None:
            raise bad_request(name, f"{name}: belongs to {needs}")


async def _tokenize_content(context: ServerContext, body: TokenizeRequest, content: str) -> TokenizeResponse:
    """Tokens of a content, without what the tokenizer adds around a text unless that is asked for."""
    ids = await context.engine.encode(
        content,
        add_special_tokens=bool(body.add_special),
        parse_special=body.parse_special is not False,
        name="content",
    )
    return TokenizeResponse(tokens=[_piece(context, token) for token in ids] if body.with_pieces else ids)


def _piece(context: ServerContext, token: int) -> TokenPiece:
    text, raw = context.texts(token)
    try:
        return TokenPiece(token, raw.decode("utf-8") if raw else text)
    except UnicodeDecodeError:
        return TokenPiece(token, list(raw))


async def detokenize(
    context: ServerContext, exchange: Exchange, read: Body[DetokenizeRequest]
) -> DetokenizeResponse:
    """Text of token ids."""
    card, body = context.card(), read.value
    context.model(body.model, exchange)
    tokens = body.tokens
    if len(tokens) > card.max_model_len:
        message = f"tokens: {len(tokens)} tokens exceed max_model_len {card.max_model_len}"
        raise bad_request("tokens", message)
    check_token_ids("tokens", tokens, card.vocab_size)
    text = await context.engine.decode(tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return DetokenizeResponse(prompt=text, content=text)


class TokenizerInfo(msgspec.Struct, kw_only=True, rename={"maximum": "model_max_length"}):
    """Answer to GET /tokenizer_info: what clients need to make prompts, by the names of tokenizer_config.json."""

    chat_template: str | None
    maximum: int
    vocab_size: int
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


async def tokenizer_info(context: ServerContext, _: Exchange) -> TokenizerInfo:
    """The special tokens and the chat template of the model."""
    card = context.card()
    texts = {
        role: card.special_tokens.get(role) for role in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    return TokenizerInfo(
        chat_template=card.chat_template or None,
        maximum=card.max_model_len,
        vocab_size=card.vocab_size,
        **texts,
    )


ROUTES = (
    Get(
        path="/tokenizer_info", summary="Special tokens and the chat template", tag="tokens", handler=tokenizer_info,
        response=TokenizerInfo,
    ),
    Post(
        path="/tokenize", summary="Token ids of a text or conversation", tag="tokens", handler=tokenize,
        request=TokenizeRequest, response=TokenizeResponse, refused=fields.CONVERSATION,
        also=("llama-server", "sglang"),
    ),
    Post(
        path="/detokenize", summary="Text of token ids", tag="tokens", handler=detokenize,
        request=DetokenizeRequest, response=DetokenizeResponse, also=("llama-server", "sglang"),
    ),
)  # fmt: skip
