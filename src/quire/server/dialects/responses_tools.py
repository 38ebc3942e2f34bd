"""Tools of servers (MCP) in a response: which there are, when they run, and how their results go back to the model.

A response with them has turns: the model answers, its calls run, and it answers again with their results, until it
calls nothing that runs here. Between two turns a request holds what it carries, and asks for memory as a new one would
(docs/decisions/0102).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from quire.engine.api import GenerateAsk
from quire.mcp.session import MAX_RESULT_CHARS, McpError, OfferedTool, cut
from quire.mcp.settings import ServerSettings
from quire.mcp.toolbox import read_arguments
from quire.records import dataclass
from quire.server.chat import prepare_chat
from quire.server.context import ServerContext
from quire.server.dialects.blocks import BlockAnswer
from quire.server.dialects.responses_answers import CUT, ItemMaker, ResponseStream, ServerTool, usage_sum
from quire.server.dialects.responses_input import Item, McpNames, chat_choice, chat_messages, chat_tool
from quire.server.dialects.responses_types import McpOffer, ResponseBody, ResponsesRequest, ResponsesUsage
from quire.server.errors import ApiError, bad_request
from quire.server.exchange import Body, Exchange, off_loop
from quire.server.generation import HttpGeneration
from quire.server.requests import ChatCompletionRequest
from quire.server.tool_servers import ToolServers
from quire.text.tools import MAX_NAME_CHARS, read_tools
from quire.types import ContextLengthError, FinishReason, RequestError

Send = Callable[[bytes], Awaitable[None]]
# Makes the chat request of a turn from its messages, tools and choice.
Asks = Callable[[list[dict[str, Any]], list[dict[str, Any]], Any], ChatCompletionRequest]

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_INVALID_ARGUMENTS = -32602
_REFUSED = ("authorization", "connector_id", "tunnel_id")
_encode = msgspec.json.Encoder().encode


class _ListedTool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    annotations: dict[str, Any] | None = None


class _ListedItem(msgspec.Struct):
    server_label: str
    tools: list[_ListedTool]
    error: str | None = None


@dataclass(slots=True)
class _Offer:
    """The tools of a server that a request offers; `tools` once they are known."""

    index: int
    asked: McpOffer
    server: ServerSettings
    tools: list[_ListedTool]
    listed: bool = False


def find_offers(context: ServerContext, body: ResponsesRequest) -> list[_Offer]:
    """The tool servers that a request asks for. Raises ApiError for one that the operator did not name."""
    found: list[_Offer] = []
    for index, asked in enumerate(body.tools or ()):
        if not isinstance(asked, McpOffer):
            continue
        field = f"tools[{index}]"
        if context.tools is None:
            raise bad_request(
                field, f"{field}: this server has no tool servers (see --mcp)", "unsupported_parameter"
            )
        server = _server(context.tools, field, asked)
        if any(other.asked.server_label == asked.server_label for other in found):
            where = f"{field}.server_label"
            raise bad_request(where, f"{where}: {asked.server_label!r} is the label of two tool servers")
        found.append(_Offer(index, asked, server, []))
    _check_choice(body.tool_choice, [offer.asked.server_label for offer in found])
    return found


def _server(tools: ToolServers, field: str, asked: McpOffer) -> ServerSettings:
    """The server that an entry of `tools` means. Raises ApiError."""
    for name in _REFUSED:
        if getattr(asked, name) is not None:
            raise _refused(
                f"{field}.{name}", "not accepted; the operator's file says how a tool server is reached"
            )
    if asked.headers:
        raise _refused(
            f"{field}.headers", "not accepted; the operator's file has the headers of a tool server"
        )
    if asked.defer_loading:
        raise _refused(f"{field}.defer_loading", "must be false; all tools are in the prompt")
    if asked.allowed_callers is not None and "direct" not in asked.allowed_callers:
        raise _refused(f"{field}.allowed_callers", "must have direct: the model calls tools itself")
    server = tools.find(asked.server_label, asked.server_url)
    if server is None:
        where = f"{field}.server_label" if asked.server_url is None else f"{field}.server_url"
        known = ", ".join(tools.names)
        what = "is not a tool server" if asked.server_url is None else "is not the address of a tool server"
        shown = asked.server_label if asked.server_url is None else asked.server_url
        raise bad_request(
            where, f"{where}: {shown!r:.200} {what} of this server's operator, who named {known}"
        )
    return server


def _refused(where: str, why: str) -> ApiError:
    return bad_request(where, f"{where}: {why}", "unsupported_parameter")


def _check_choice(choice: Any, labels: Sequence[str]) -> None:
    """Raise ApiError for a tool_choice with a tool server that is not among the tools."""
    if not isinstance(choice, dict):
        return
    listed = choice.get("tools") if choice.get("type") == "allowed_tools" else [choice]
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and one.get("type") == "mcp" and one.get("server_label") not in labels:
            label = one.get("server_label")
            raise bad_request(
                "tool_choice", f"tool_choice: {label!r:.80} is not the label of a tool server in tools"
            )


class ToolTurns:
    """The turns of one response. `prior` is JSON of all items before it, of which the last `own` are those of its own
    request. `items` are its output so far; `cut` says why it is incomplete, once it is.
    """

    def __init__(
        self, context: ServerContext, body: ResponsesRequest, offers: list[_Offer], response: ResponseBody,
        prior: bytes, own: int, asks: Asks,
    ) -> None:  # fmt: skip
        assert context.tools is not None
        self._context, self._tools, self._body, self._response = context, context.tools, body, response
        self._offers, self._prior, self._own, self._asks = offers, prior, own, asks
        self._most_calls, self._tokens = body.max_tool_calls, body.max_output_tokens
        self._functions: list[dict[str, Any]] = []
        self._fields: list[str] = []  # of the request, for each of them
        self._mine: list[str] = []  # functions of the client
        self._left = 0  # bytes of items that may still be carried
        self._turn = self._calls = 0
        self._stream: ResponseStream | None = None
        self._exchange: Exchange | None = None
        self._deliver: Send | None = None
        self._sending = asyncio.Lock()
        self.maker = ItemMaker(response.id)
        self.items: list[Item] = []
        self.usage: ResponsesUsage | None = None
        self.cut: str | None = None
        self.names: dict[str, str] = {}  # patterns of fields inside, and what the client calls them

    async def first(
        self, exchange: Exchange, stream: ResponseStream | None = None, send: Send | None = None
    ) -> list[GenerateAsk]:
        """List tools, run calls that have been approved; returns the first turn. Events go to `send`, if there is one.
        Raises ApiError or RequestError naming the field.
        """
        self._exchange, self._stream, self._deliver = exchange, stream, send
        memory = self._context.memory
        exchange.held.give(memory.work)  # servers are waited for now
        self._left = memory.take_turns(exchange.held, self._context.card().max_model_len)
        items = await self._before()
        self._read_lists(items)
        approved = self._approved(items)
        unlisted = [offer for offer in self._offers if not offer.listed]
        await asyncio.gather(*[self._list(offer) for offer in unlisted])
        self._name_tools()
        await asyncio.gather(*[self._run_approved(*one) for one in approved])
        return [await self._ask()]

    async def more(self, run: HttpGeneration, answer: BlockAnswer) -> list[GenerateAsk]:
        """Take the answer of a turn and run its calls; returns the next turn, none at the end of the response."""
        self._turn += 1
        card = self._context.engine.card
        self.usage = usage_sum(self.usage, run, card.cache_block)
        self.cut = CUT.get(run.outputs[0].outputs[0].finish_reason or FinishReason.ABORT)
        if self._stream is not None:
            await self._send(self._stream.close(cut=self.cut is not None))
        made = self.maker.items(answer.blocks, cut=self.cut is not None)
        first = len(self.items)
        self.items += made
        self._left -= len(_encode(made))
        calls = [(first + at, item) for at, item in enumerate(made) if item["type"] == "mcp_call"]
        if self.cut is not None:
            for at, item in calls:
                item["status"] = "incomplete"
                await self._send_done(at, item)
            return []
        await asyncio.gather(*[self._run_call(at, item) for at, item in calls])
        waits = any(item["type"] in {"function_call", "mcp_approval_request"} for item in made)
        if waits or not calls:
            return []
        return await self._next(run)

    # ---- turns

    async def _next(self, run: HttpGeneration) -> list[GenerateAsk]:
        """The next turn; none where the context, or what may be generated, is used up: the response is cut then."""
        assert self._exchange is not None
        if self._tokens is not None:
            self._tokens -= run.usage().completion_tokens
        if self._left > 0 and (self._tokens is None or self._tokens > 0):
            self._exchange.held.give(self._context.memory.answers)  # what is carried was taken at the start
            self._exchange.turn = time.monotonic()
            self.maker.base = len(self.items)
            if self._stream is not None:
                self._stream.begin_turn()
            try:
                return [await self._ask()]
            except ContextLengthError:
                pass
        self.cut = "max_output_tokens"
        return []

    async def _before(self) -> list[Item]:
        prior = self._prior
        return await off_loop(len(prior), lambda: msgspec.json.decode(prior, type=list[Item]))

    async def _ask(self) -> GenerateAsk:
        """The request of a turn. Raises ApiError or RequestError naming the field."""
        context, exchange, later = self._context, self._exchange, self._turn > 0
        assert exchange is not None
        carried = _encode(self.items)
        await context.memory.take_work(
            exchange.held, b"".join((self._prior, carried)), context.config.body_timeout
        )
        items = [*await self._before(), *self.items]
        functions = {(tool.label, tool.name): name for name, tool in self.maker.tools.items()}
        messages = chat_messages(items, self._body.instructions, McpNames(functions))
        asked = self._asks(messages, self._functions, self._choice())
        window = None
        if later:
            asked.max_tokens, window = None, context.card().max_model_len
        read = Body(len(self._prior) + len(carried), asked)
        found = (await prepare_chat(context, exchange, read, self._response.id, window=window)).ask
        params = found.request.params
        if later and self._tokens is not None and params.max_tokens is not None:
            params = replace(params, max_tokens=min(self._tokens, params.max_tokens))
            found = replace(found, request=replace(found.request, params=params))
        return found

    def _choice(self) -> Any:
        """The tool_choice of a turn: one that asks for a call asks for the first; when no more may run, those of the
        client are left.
        """
        choice = self._body.tool_choice
        rounds_left = self._turn < self._tools.settings.rounds
        calls_left = self._most_calls is None or self._calls < self._most_calls
        if not (rounds_left and calls_left):
            return _allowed("auto", self._mine) if self._mine else "none"
        if not isinstance(choice, dict):
            if choice == "required" and not self._functions:
                raise self._no_tools()
            return "auto" if choice == "required" and self._turn else choice
        if choice.get("type") == "mcp":
            if self._turn:
                return "auto"
            names = self._chosen(choice)
            if not names:
                raise self._no_tools()
            return _allowed("required", names)
        if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
            names = [name for one in choice["tools"] if isinstance(one, dict) for name in self._chosen(one)]
            mode = "auto" if self._turn else choice.get("mode", "auto")
            if mode == "required" and not names:
                raise self._no_tools()
            return _allowed(mode, names) if names else "none"
        return "auto" if self._turn else chat_choice(choice)

    def _chosen(self, one: Mapping[str, Any]) -> list[str]:
        """The functions that an entry of tool_choice means."""
        if one.get("type") != "mcp":
            return [one["name"]] if isinstance(one.get("name"), str) else []
        label, name = one.get("server_label"), one.get("name")
        return [
            function
            for function, tool in self.maker.tools.items()
            if tool.label == label and name in {None, tool.name}
        ]

    @staticmethod
    def _no_tools() -> ApiError:
        message = "tool_choice: there is no such tool; see the errors of mcp_list_tools"
        return ApiError(424, message, code="mcp_tools_not_found", param="tool_choice")

    # ---- tools

    def _read_lists(self, items: Sequence[Item]) -> None:
        """Take the tools that the conversation has listed already. Raises ApiError."""
        offers = {offer.asked.server_label: offer for offer in self._offers}
        for index, item in enumerate(items):
            offer = offers.get(item.get("server_label", "")) if item.get("type") == "mcp_list_tools" else None
            if offer is None:
                continue
            try:
                listed = msgspec.convert(item, _ListedItem)
            except msgspec.ValidationError as error:
                field = f"input[{index}]"
                raise bad_request(field, f"{field}: {error}") from None
            if not listed.error:
                offer.tools, offer.listed = listed.tools, True

    async def _list(self, offer: _Offer) -> None:
        """Ask a server for its tools; what goes wrong is told in the item."""
        assert self._exchange is not None
        label, at = offer.asked.server_label, len(self.items)
        item: Item = {
            "id": self.maker.name("mcpl", at), "type": "mcp_list_tools", "server_label": label, "tools": [],
            "error": None,
        }  # fmt: skip
        self.items.append(item)
        self.maker.base = len(self.items)
        if self._stream is not None:
            await self._send(self._stream.listing(at, item))
        try:
            found = await self._tools.tools(self._exchange.tenant, offer.server, self._context.metrics.tools)
            tools = [_listed(tool) for tool in found if self._usable(offer, tool)]
            size = len(_encode(tools))
            if size > self._left // 2:
                raise McpError(
                    f"MCP server {offer.server.name!r} lists tools of {size} bytes, over the limit of "
                    f"{self._left // 2} for this model's context: name fewer in allowed_tools"
                )
            self._left -= size
            offer.tools = tools
            item["tools"] = [msgspec.structs.asdict(tool) for tool in tools]
        except McpError as error:
            item["error"] = str(error)
        if self._stream is not None:
            await self._send(self._stream.listed(at, item))

    def _usable(self, offer: _Offer, tool: OfferedTool) -> bool:
        """Whether a tool is asked for, and one that a model can call."""
        if not offer.asked.allows(tool.name, tool.annotations):
            return False
        try:
            read_tools([_function(_clean(tool.name), tool.description, tool.parameters)])
        except RequestError as error:
            self._tools.tell(f"MCP server {offer.server.name!r}: {tool.name!r} cannot be called: {error}")
            return False
        return True

    def _name_tools(self) -> None:
        """Give each tool the name of a function, and list the functions of the request in their order."""
        offers = {offer.index: offer for offer in self._offers}
        given = list(self._body.tools or ())
        self._mine = [tool.name for tool in given if not isinstance(tool, McpOffer)]
        shown = {
            offer.index: [
                tool
                for tool in offer.tools
                if offer.server.allows(tool.name) and offer.asked.allows(tool.name, tool.annotations)
            ]
            for offer in self._offers
        }
        wanted = Counter([*self._mine, *(_clean(tool.name) for tools in shown.values() for tool in tools)])
        for index, given_tool in enumerate(given):
            if not isinstance(given_tool, McpOffer):
                self._add(chat_tool(f"tools[{index}]", given_tool), f"tools[{index}]")
                continue
            for tool in shown[index]:
                name = _clean(tool.name)
                if wanted[name] > 1:
                    name = _clean(f"{given_tool.server_label}_{tool.name}")
                while name in self.maker.tools or name in self._mine:
                    name = f"{name[: MAX_NAME_CHARS - 1]}_"
                approval = given_tool.needs_approval(tool.name, tool.annotations)
                server = offers[index].server
                self.maker.tools[name] = ServerTool(given_tool.server_label, server, tool.name, approval)
                about = [text for text in (given_tool.server_description, tool.description) if text]
                self._add(_function(name, "\n\n".join(about), tool.input_schema), f"tools[{index}].{name}")
        inside = {rf"tools\[{at}\]\.function": field for at, field in enumerate(self._fields)}
        known = dict(self.names)
        self.names.clear()
        self.names |= inside | known

    def _add(self, function: dict[str, Any], field: str) -> None:
        """Add a function of the field `field`."""
        self._functions.append(function)
        self._fields.append(field)

    # ---- calls

    def _approved(self, items: Sequence[Item]) -> list[tuple[Item, _Offer]]:
        """The calls that the request approves, and their servers. Raises ApiError naming what is wrong."""
        asked = {item.get("id"): item for item in items if item.get("type") == "mcp_approval_request"}
        ran = {str(item.get("approval_request_id")) for item in items if item.get("type") == "mcp_call"}
        offers = {offer.asked.server_label: offer for offer in self._offers}
        found: dict[str, tuple[Item, _Offer]] = {}
        first = len(items) - self._own
        for index, item in enumerate(items[first:]):
            if item.get("type") != "mcp_approval_response" or item.get("approve") is not True:
                continue
            name, field = item.get("approval_request_id"), f"input[{index}].approval_request_id"
            call = asked.get(name) if isinstance(name, str) else None
            if call is None or name in ran:
                what = (
                    "there is no such mcp_approval_request" if call is None else "it has been answered before"
                )
                raise bad_request(field, f"{field}: {what}")
            offer, tool = offers.get(call.get("server_label", "")), call.get("name")
            if offer is None or not isinstance(tool, str) or not offer.server.allows(tool):
                raise bad_request(field, f"{field}: {tool!r:.80} is not a tool of a server in tools")
            if not isinstance(call.get("arguments"), str):
                raise bad_request(field, f"{field}: its arguments are no text", "invalid_type")
            found[call["id"]] = call, offer
        return list(found.values())

    async def _run_approved(self, asked: Item, offer: _Offer) -> None:
        at = len(self.items)
        item = self.maker.call(at, offer.asked.server_label, asked["name"], asked["arguments"])
        item["approval_request_id"] = asked["id"]
        self.items.append(item)
        self.maker.base = len(self.items)
        self._left -= len(_encode(item))
        if self._stream is not None:
            await self._send(self._stream.whole_call(at, item))
        await self._run_call(at, item)

    async def _run_call(self, at: int, item: Item) -> None:
        """Run a call; its item tells what came of it."""
        self._calls += 1
        try:
            if self._most_calls is not None and self._calls > self._most_calls:
                raise McpError(
                    f"the limit of {self._most_calls} calls in a response is reached (max_tool_calls)"
                )
            text, failed = await self._result(item)
        except McpError as error:
            item["error"] = _error(error)
        else:
            text = self._fitting(text)
            if failed:
                content = [{"type": "text", "text": text}]
                item["error"] = {"type": "mcp_tool_execution_error", "content": content}
            else:
                item["output"] = text
            self._left -= len(_encode(text))
        item["status"] = "failed" if item["error"] else "completed"
        await self._send_done(at, item)

    async def _result(self, item: Item) -> tuple[str, bool]:
        """The text of a result, and whether the tool says that it failed. Raises McpError."""
        assert self._exchange is not None
        label, name = item["server_label"], item["name"]
        server = next(
            (t.server for t in self.maker.tools.values() if (t.label, t.name) == (label, name)), None
        )
        if server is None:  # approved, but not offered any more
            raise McpError(f"{name!r} of {label!r} is not among the tools of this response")
        try:
            arguments = read_arguments(item["arguments"])
        except ValueError as error:
            raise McpError(str(error), code=_INVALID_ARGUMENTS) from None
        counts = self._context.metrics.tools
        found = await self._tools.call(self._exchange.tenant, server, counts, name, arguments)
        return found.text, found.failed

    def _fitting(self, text: str) -> str:
        """A result that the context may hold, and what is carried."""
        chars = min(len(text), MAX_RESULT_CHARS, 2 * self._context.engine.card.max_model_len)
        while chars and len(_encode(cut(text, chars))) > self._left:
            chars //= 2
        return cut(text, chars)

    async def _send_done(self, at: int, item: Item) -> None:
        if self._stream is not None:
            await self._send(self._stream.called(at, item))

    async def _send(self, data: bytes) -> None:
        """Events go out in the order in which they were made."""
        async with self._sending:
            if self._deliver is not None and data:
                await self._deliver(data)


def _allowed(mode: str, names: Sequence[str]) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def _clean(name: str) -> str:
    """The name of a tool as a function may have it."""
    return _NOT_IN_NAMES.sub("_", name)[:MAX_NAME_CHARS] or "_"


def _function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _listed(tool: OfferedTool) -> _ListedTool:
    annotations = None if tool.annotations is None else dict(tool.annotations)
    return _ListedTool(tool.name, dict(tool.parameters), tool.description or None, annotations)


def _error(error: McpError) -> dict[str, Any]:
    """An error of a call as its item has it."""
    if error.status:
        return {"type": "http_error", "code": error.status, "message": str(error)}
    return {"type": "mcp_protocol_error", "code": error.code, "message": str(error)}
