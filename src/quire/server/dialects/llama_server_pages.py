"""llama-server's pages beside its completions: properties, slots, and conversations as text."""

from __future__ import annotations

from typing import Any

import msgspec

from quire import __version__
from quire.outputs import RequestOutput
from quire.server import fields
from quire.server.chat import RenderRequest, chat_ask
from quire.server.context import ServerContext
from quire.server.dialects.llama_server import settings_of
from quire.server.dialects.llama_server_types import LLAMA_SERVER_ERRORS, LlamaServerRequest
from quire.server.errors import ApiError, retry_headers
from quire.server.exchange import Body, Exchange
from quire.server.query import query_of
from quire.server.routes import Get, HttpRoute, Post
from quire.text.tools import read_tools
from quire.types import Request, SamplingParams

_IDLE = -1


class DefaultSettings(msgspec.Struct):
    """The parameters of a request that sets none."""

    n_ctx: int
    params: dict[str, Any]


class LlamaServerProps(msgspec.Struct, kw_only=True):
    """Answer to GET /props. A slot is a sequence that may run."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_path: str
    model_alias: str
    chat_template: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool = False


class NextToken(msgspec.Struct):
    """How far a slot is; n_remain is -1 without a limit."""

    has_next_token: bool = False
    n_remain: int = _IDLE
    n_decoded: int = 0


class LlamaServerSlot(msgspec.Struct, kw_only=True):
    """A sequence that runs, or a place for one. `id_task` is the id of its request, -1 for a place."""

    id: int
    id_task: str | int
    n_ctx: int
    is_processing: bool
    params: dict[str, Any] = {}
    prompt: str = ""
    next_token: NextToken


class AppliedTemplate(msgspec.Struct):
    """A conversation as the model sees it."""

    prompt: str


async def props(context: ServerContext, _: Exchange) -> LlamaServerProps:
    """The limits, defaults and chat template of the server."""
    card, model = context.card(), context.names()[0]
    defaults: dict[str, Any] = {**card.default_sampling}
    settings = settings_of(LlamaServerRequest(), SamplingParams(**defaults), model, card.max_model_len)
    return LlamaServerProps(
        default_generation_settings=DefaultSettings(card.max_model_len, settings),
        total_slots=card.max_num_seqs,
        model_path=card.name,
        model_alias=model,
        chat_template=card.chat_template,
        modalities={"vision": False, "audio": False},
        build_info=f"quire-{__version__}",
    )


async def slots(context: ServerContext, exchange: Exchange) -> list[LlamaServerSlot]:
    """The sequences that run, with their prompts, and the places that are free.

    Raises ApiError 503 where there is none and the query asks for it.
    """
    card = context.card()
    found: list[LlamaServerSlot] = []
    for request, output in context.engine.requests():
        if output.timings.scheduled:
            found += await _slots_of(context, exchange, request, output, len(found))
    query = query_of(exchange.scope["query_string"])
    if len(found) >= card.max_num_seqs and query.get("fail_on_no_slot") == "1":
        raise ApiError(503, "no slot available", code="no_slot", headers=retry_headers(1.0))
    return found + [
        LlamaServerSlot(
            id=number, id_task=_IDLE, n_ctx=card.max_model_len, is_processing=False, next_token=NextToken()
        )
        for number in range(len(found), card.max_num_seqs)
    ]


async def _slots_of(
    context: ServerContext, exchange: Exchange, request: Request, output: RequestOutput, first: int
) -> list[LlamaServerSlot]:
    """The running sequences of a request, numbered from `first`."""
    params, window = request.params, context.engine.card.max_model_len
    running = [sample for sample in output.outputs if sample.finish_reason is None]
    context.memory.take_echo(exchange.held, len(request.prompt_token_ids))
    prompt = await context.engine.decode(request.prompt_token_ids)
    length = params.max_tokens
    settings = settings_of(LlamaServerRequest(n_predict=length), params, context.names()[0], window)
    return [
        LlamaServerSlot(
            id=number,
            id_task=request.request_id,
            n_ctx=window,
            is_processing=True,
            params=settings,
            prompt=prompt,
            next_token=NextToken(
                True, _IDLE if length is None else length - len(sample.token_ids), len(sample.token_ids)
            ),
        )
        for number, sample in enumerate(running, first)
    ]


async def apply_template(
    context: ServerContext, exchange: Exchange, read: Body[RenderRequest]
) -> AppliedTemplate:
    """A conversation as text, for a completion."""
    body = read.value
    context.card()
    context.model(body.model, exchange)
    ask = chat_ask(body, body.messages, read_tools(body.tools))
    return AppliedTemplate(await context.engine.render_chat(ask))


ROUTES: tuple[HttpRoute, ...] = (
    Get(
        path="/props", summary="Limits, defaults and chat template, in llama-server's form", tag="llama-server",
        handler=props, response=LlamaServerProps, api="llama-server", errors=LLAMA_SERVER_ERRORS,
    ),
    Get(
        path="/slots", summary="Running sequences with their prompts, in llama-server's form", tag="llama-server",
        handler=slots, response=list[LlamaServerSlot], api="llama-server", errors=LLAMA_SERVER_ERRORS, admin=True,
    ),
    Post(
        path="/apply-template", summary="A conversation as text, in llama-server's form", tag="llama-server",
        handler=apply_template, request=RenderRequest, response=AppliedTemplate, refused=fields.CONVERSATION,
        api="llama-server", errors=LLAMA_SERVER_ERRORS,
    ),
)  # fmt: skip
