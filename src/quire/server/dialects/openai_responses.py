"""OpenAI's /v1/responses, translated to a chat request; stored responses, and those that run in the background."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quire.engine.api import GenerateAsk
from quire.server.answering import AnswerStream, Send, StreamForm, generating_model
from quire.server.chat import prepare_chat
from quire.server.context import ServerContext
from quire.server.dialects.asking import Renames, renamed, thinking_fields
from quire.server.dialects.blocks import BlockAnswer
from quire.server.dialects.response_store import ResponseStore, StoredResponse, StoreError
from quire.server.dialects.responses_answers import ResponseStream, complete, finish
from quire.server.dialects.responses_input import chat_choice, chat_messages, chat_tool, input_items
from quire.server.dialects.responses_types import (
    IGNORED,
    REFUSED,
    RESPONSES_ERRORS,
    DeletedResponse,
    InputItems,
    McpOffer,
    ObjectFormat,
    ResponseBody,
    ResponseEvent,
    ResponsesError,
    ResponsesRequest,
    SchemaFormat,
)
from quire.server.errors import ApiError, api_error, bad_request
from quire.server.exchange import Body, Exchange, off_loop
from quire.server.generation import HttpGeneration
from quire.server.query import PAGE, page_of, query_of
from quire.server.request_memory import answer_costs
from quire.server.requests import ChatCompletionRequest, JsonObjectFormat, JsonSchemaFormat, NamedSchema
from quire.server.routes import Act, HttpRoute, Post
from quire.server.sampling import chat_params
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.server.dialects.responses_tools import ToolTurns
    from quire.server.logprob_bodies import TokenTexts

_PATH = "/v1/responses/"
NAMES: Renames = {
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"response_format\.json_schema\.schema": "text.format.schema",
    r"max_tokens\b": "max_output_tokens",
    r"messages\b": "input",
    r"(top_)?logprobs\b": "top_logprobs",
    r"thinking_token_budget|reasoning_effort|chat_template_kwargs": "reasoning.effort",
}
_DEFAULT_EFFORT = "medium"
_MAX_ITEMS = 100


class _Prepared(NamedTuple):
    """A request ready for admission: its response as it begins, and its own input items as JSON. One with tools of
    servers has `turns`, which ask.
    """

    ask: GenerateAsk | None
    turns: ToolTurns | None
    body: ResponseBody
    input: bytes
    stored: bool
    owner: str
    texts: TokenTexts | None = None  # spell the tokens of a text with log-probabilities

    def state(self) -> StoredResponse:
        """The response as it is now."""
        body = self.body
        return StoredResponse(
            body.id, body.status, body.previous_response_id, self.input, msgspec.json.encode(body)
        )


async def create(context: ServerContext, exchange: Exchange, read: Body[ResponsesRequest]) -> bytes | None:
    """Answer a conversation: whole, as a stream, or later."""
    context.card()
    body = read.value
    if body.background and body.stream:
        raise bad_request("stream", "stream: not supported with background", "unsupported_parameter")
    if body.background and body.store is False:
        raise bad_request("store", "store: must be true with background")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise bad_request("max_tool_calls", f"max_tool_calls: {body.max_tool_calls} is below 1")
    names = dict(NAMES)
    with renamed(names):
        found = await _prepare(context, exchange, read, names)
        if body.background:
            return await _start(context, exchange, found, names)
        if body.stream:
            await _stream(context, exchange, found)
        else:
            await _answer_whole(context, exchange, found)
    return None


async def _stream(context: ServerContext, exchange: Exchange, found: _Prepared) -> None:
    turns = found.turns
    events = ResponseStream(
        found.body,
        context.engine.card.cache_block,
        None if turns is None else turns.maker,
        exchange.text_form,
        found.texts,
    )

    async def turn(run: HttpGeneration | None, send: Send) -> Sequence[GenerateAsk]:
        assert turns is not None
        return await (turns.first(exchange, events, send) if run is None else turns.more(run, events.answer))

    def last(run: HttpGeneration) -> bytes:
        if turns is None:
            return events.last(run)
        return events.finished(finish(found.body, turns.items, turns.cut, turns.usage))

    form = StreamForm(
        events.chunk_of, last, opening=events.begun, direct=events.direct, text_of=events.text_of, kept=True,
        ended=lambda: _keep(context, found), turn=None if turns is None else turn,
    )  # fmt: skip
    stream = AnswerStream(context, exchange, form, logprobs="top_logprobs")
    await stream.write([found.ask] if found.ask else ())


async def _prepare(
    context: ServerContext, exchange: Exchange, read: Body[ResponsesRequest], names: dict[str, str]
) -> _Prepared:
    body = read.value
    model = generating_model(context, exchange, body.model).name
    items = input_items(body.input)
    before = await items_before(context, exchange, body.previous_response_id)
    own = msgspec.json.encode(items)
    response = _begun(body, model)
    if any(isinstance(tool, McpOffer) for tool in body.tools or ()):
        turns = _with_turns(context, body, response, [*before, *items], len(items), names)
        return _Prepared(None, turns, response, own, response.store, exchange.tenant)
    asked = chat_request(context, body, chat_messages([*before, *items], body.instructions))
    body.input = ""
    found = await prepare_chat(context, exchange, Body(read.size, asked), response.id)
    if body.scored and found.ask.reading is not None:
        raise _unscored()
    params = found.ask.request.params
    response.temperature, response.top_p = params.temperature, params.top_p
    texts = context.texts if body.scored else None
    return _Prepared(found.ask, None, response, own, response.store, exchange.tenant, texts)


def _unscored() -> ApiError:
    name = "top_logprobs"
    why = "an answer with reasoning or calls does not say which item a token belongs to; chats have them"
    return bad_request(name, f"{name}: {why}", "unsupported_parameter")


def _with_turns(
    context: ServerContext, body: ResponsesRequest, response: ResponseBody, items: list[dict[str, Any]], own: int,
    names: dict[str, str],
) -> ToolTurns:  # fmt: skip
    """The turns of a response with tools of servers. Raises ApiError or RequestError naming the field."""
    from quire.server.dialects.responses_tools import ToolTurns, find_offers

    if body.scored:
        raise _unscored()
    offers = find_offers(context, body)
    # what is wrong with the items, or with a parameter, is told before a server is asked
    messages = chat_messages(items, body.instructions)
    params = chat_params(chat_request(context, body, messages, ([], None)), context.card().default_sampling)
    response.temperature, response.top_p = params.temperature, params.top_p
    body.input = ""

    def ask(
        messages: list[dict[str, Any]], tools: list[dict[str, Any]], choice: Any
    ) -> ChatCompletionRequest:
        return chat_request(context, body, messages, (tools, choice))

    turns = ToolTurns(context, body, offers, response, msgspec.json.encode(items), own, ask)
    turns.names = names
    return turns


def _begun(body: ResponsesRequest, model: str) -> ResponseBody:
    """The response as it begins."""
    text, reasoning = body.text, body.reasoning
    form: Any = {"type": "text"} if text is None or text.format is None else text.format
    return ResponseBody(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": reasoning.effort if reasoning else None, "summary": None},
        store=body.store is not False,
        temperature=None,
        text={"format": form, "verbosity": "medium"},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=list(body.tools or ()),
        top_logprobs=body.top_logprobs or 0,
        top_p=None,
        user=body.user,
    )


def _functions(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The client's functions, in the form of a chat."""
    return [
        chat_tool(f"tools[{i}]", tool)
        for i, tool in enumerate(body.tools or ())
        if not isinstance(tool, McpOffer)
    ]


def chat_request(
    context: ServerContext, body: ResponsesRequest, messages: list[dict[str, Any]],
    named: tuple[list[dict[str, Any]], Any] | None = None,
) -> ChatCompletionRequest:  # fmt: skip
    """The same request inside; `named` are its tools and their choice, where they are not those of the body. Raises
    ApiError or RequestError naming the field.
    """
    effort = body.reasoning.effort if body.reasoning else None
    fields: dict[str, Any] = {}
    if effort == "none":
        fields = thinking_fields(context, False, "reasoning.effort")
    elif effort is not None and not (
        effort == _DEFAULT_EFFORT and "reasoning_effort" not in context.engine.card.template_variables
    ):
        fields = thinking_fields(context, effort, "reasoning.effort")
    fields |= {"max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p}
    if named is None:
        named = _functions(body), chat_choice(body.tool_choice)
    tools, choice = named
    return ChatCompletionRequest(
        messages=messages,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        service_tier=body.service_tier,
        prompt_cache_retention=body.prompt_cache_retention,
        logprobs=body.scored or None,
        top_logprobs=body.top_logprobs,
        **fields,
    )


def _response_format(body: ResponsesRequest) -> JsonSchemaFormat | JsonObjectFormat | None:
    match body.text.format if body.text else None:
        case SchemaFormat(schema=schema, strict=strict):
            return JsonSchemaFormat(NamedSchema(schema=schema, strict=strict))
        case ObjectFormat():
            return JsonObjectFormat()
        case _:
            return None


async def items_before(
    context: ServerContext, exchange: Exchange, previous: str | None
) -> list[dict[str, Any]]:
    """The items of the responses before. Raises ApiError for one that is not there, or not finished."""
    if previous is None:
        return []
    field = "previous_response_id"
    try:
        found = await _store(context).chain(exchange.tenant, previous, context.memory.largest_body)
    except StoreError as error:
        raise bad_request(field, f"{field}: {error}") from None
    if found is None:
        raise ApiError(404, f"{field}: no such response", code="previous_response_not_found", param=field)
    if found[-1].status not in {"completed", "incomplete"}:
        raise bad_request(field, f"{field}: this response is {found[-1].status}")
    size = sum(len(response.input) + len(response.body) for response in found)
    context.memory.take_body(exchange.held, size)

    def items() -> list[dict[str, Any]]:
        read: list[dict[str, Any]] = []
        for response in found:
            read += msgspec.json.decode(response.input)
            read += msgspec.json.decode(response.body)["output"]
        return read

    return await off_loop(size, items)


# ---- answering


async def _generate(context: ServerContext, exchange: Exchange, found: _Prepared) -> None:
    """Generate the whole response, and keep it."""
    turns, card = found.turns, context.engine.card
    asks = [found.ask] if found.ask is not None else []
    if turns is not None:
        asks = await turns.first(exchange)
    while asks:
        costs = answer_costs(
            asks,
            card.max_model_len,
            unread=None,
            held_back=False,
            recorded=exchange.recorded is not None,
            kept=True,
            logprobs="top_logprobs",
        )
        async with HttpGeneration(context, exchange, asks, costs) as run:
            await run.finish(partial(BlockAnswer, found.texts))
        (answer,) = run.answers
        assert isinstance(answer, BlockAnswer)
        if turns is None:
            complete(found.body, answer, run, card.cache_block)
            break
        asks = await turns.more(run, answer)
    if turns is not None:
        finish(found.body, turns.items, turns.cut, turns.usage)
    await _keep(context, found)


async def _answer_whole(context: ServerContext, exchange: Exchange, found: _Prepared) -> None:
    async with exchange.watch() as watch:
        await _generate(context, exchange, found)
        with context.watched(watch):
            await exchange.respond(200, msgspec.json.encode(found.body))


async def _keep(context: ServerContext, found: _Prepared) -> None:
    if found.stored:
        await _store(context).put(found.owner, found.state())


async def _start(
    context: ServerContext, exchange: Exchange, found: _Prepared, names: dict[str, str]
) -> bytes:
    """Generate in the background; returns the response as it begins."""
    found.body.status = "queued"
    await _keep(context, found)
    answer = msgspec.json.encode(found.body)
    task = asyncio.create_task(_run_behind(context, exchange.detached(), found, names))
    context.behind[found.body.id] = task
    task.add_done_callback(lambda _: context.behind.pop(found.body.id, None))
    await asyncio.sleep(0)  # it has begun: from now on it notes its own end, also when it is cancelled
    return answer


async def _run_behind(
    context: ServerContext, exchange: Exchange, found: _Prepared, names: dict[str, str]
) -> None:
    body = found.body
    try:
        body.status = "in_progress"
        await _keep(context, found)
        with renamed(names):
            await _generate(context, exchange, found)
    except (QuireError, ApiError) as error:
        shown = api_error(error)
        body.status, body.error = "failed", ResponsesError(shown.code, str(shown))
        await _keep(context, found)
    except asyncio.CancelledError:
        body.status = "cancelled"
        with contextlib.suppress(StoreError):
            await _keep(context, found)
    finally:
        exchange.held.close()
        if body.status == "in_progress":  # a failure that nobody expected, which is logged
            body.status, body.error = "failed", ResponsesError("internal_error", "internal error")
            await _keep(context, found)


# ---- stored responses


def _store(context: ServerContext) -> ResponseStore:
    if context.responses is None:
        config = context.config
        context.responses = ResponseStore(
            config.response_store, config.response_store_size, config.response_store_days
        )
    return context.responses


def _asked(exchange: Exchange, behind: str = "") -> str:
    """The id in the path."""
    return exchange.path.removeprefix(_PATH).removesuffix(behind)


def _missing() -> ApiError:
    return ApiError(404, "no such response", code="response_not_found")


async def _found(context: ServerContext, exchange: Exchange, behind: str = "") -> StoredResponse:
    """The response in the path. Raises ApiError 404 for one that is missing, has expired, or is of another key."""
    found = await _store(context).get(exchange.tenant, _asked(exchange, behind))
    if found is None:
        raise _missing()
    return found


async def retrieve(context: ServerContext, exchange: Exchange) -> bytes:
    """A stored response."""
    if query_of(exchange.scope["query_string"], {"stream"}).get("stream", "false").lower() not in {
        "",
        "false",
    }:
        raise bad_request(
            "stream", "stream: not supported; ask again for the response", "unsupported_parameter"
        )
    return (await _found(context, exchange)).body


async def delete(context: ServerContext, exchange: Exchange) -> DeletedResponse:
    """Remove a stored response; one that runs in the background ends."""
    name = _asked(exchange)
    await _found(context, exchange)
    await _end(context, name)
    if not await _store(context).delete(exchange.tenant, name):
        raise _missing()
    return DeletedResponse(id=name)


async def cancel(context: ServerContext, exchange: Exchange) -> bytes:
    """End a response that runs in the background; returns it as it is then."""
    found = await _found(context, exchange, "/cancel")
    if not msgspec.json.decode(found.body)["background"]:
        raise bad_request(None, "only a response with background can be cancelled")
    await _end(context, found.id)
    return (await _found(context, exchange, "/cancel")).body


async def _end(context: ServerContext, name: str) -> None:
    task = context.behind.get(name)
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


async def listed(context: ServerContext, exchange: Exchange) -> InputItems:
    """The input items of a stored response, the last first unless `order` is asc."""
    found = await _found(context, exchange, "/input_items")
    query = query_of(exchange.scope["query_string"], PAGE)
    items = [_numbered(found.id, i, item) for i, item in enumerate(msgspec.json.decode(found.input))]
    some, more = page_of(items, itemgetter("id"), query, 20, _MAX_ITEMS)
    ends = (some[0]["id"], some[-1]["id"]) if some else (None, None)
    return InputItems(data=some, first_id=ends[0], last_id=ends[1], has_more=more)


def _numbered(response_id: str, index: int, item: dict[str, Any]) -> dict[str, Any]:
    """An input item with a type, an id, and its content as parts."""
    made = {"type": "message", "id": f"item_{response_id.removeprefix('resp_')}{index:04x}"} | item
    if made["type"] == "message" and isinstance(made.get("content"), str):
        kind = "output_text" if made.get("role") == "assistant" else "input_text"
        made["content"] = [{"type": kind, "text": made["content"]}]
    return made


_Handler = Callable[[ServerContext, Exchange], Awaitable[Any]]


def _route(verb: str, behind: str, summary: str, handler: _Handler, response: type[Any]) -> HttpRoute:
    return Act(
        verb=verb, path=f"{_PATH}{{}}{behind}", rest="response_id", summary=summary, tag="responses", handler=handler,
        response=response, errors=RESPONSES_ERRORS,
    )  # fmt: skip


ROUTES: tuple[HttpRoute, ...] = (
    Post(
        path="/v1/responses", summary="Answer a conversation, and keep it", tag="responses", handler=create,
        request=ResponsesRequest, response=ResponseBody, chunk=ResponseEvent, refused=REFUSED, ignored=IGNORED,
        errors=RESPONSES_ERRORS,
    ),
    _route("GET", "", "A stored response", retrieve, ResponseBody),
    _route("DELETE", "", "Remove a stored response", delete, DeletedResponse),
    _route("POST", "/cancel", "End a response that runs in the background", cancel, ResponseBody),
    _route("GET", "/input_items", "What a stored response was asked", listed, InputItems),
)  # fmt: skip
