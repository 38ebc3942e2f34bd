"""Answers in the form of OpenAI's Responses: items, whole and as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from quire.answers import AnswerPart, PartKind
from quire.engine.api import StreamDelta
from quire.records import dataclass
from quire.server.dialects.blocks import Block, BlockAnswer, BlockChange, BlockStep, parts_of
from quire.server.dialects.responses_input import TOGETHER, Item
from quire.server.dialects.responses_types import (
    CachedInput,
    ReasonedOutput,
    ResponseBody,
    ResponsesUsage,
)
from quire.server.exchange import TEXT_END, TextForm
from quire.server.generation import HttpGeneration
from quire.types import FinishReason

if TYPE_CHECKING:
    from quire.mcp.settings import ServerSettings
    from quire.server.logprob_bodies import TokenTexts

_encode = msgspec.json.Encoder().encode
_PREFIX = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}
_DELTA = {
    PartKind.TEXT: "response.output_text.delta",
    PartKind.REASONING: "response.reasoning_text.delta",
    PartKind.CALL: "response.function_call_arguments.delta",
}
_MCP_DELTA = "response.mcp_call_arguments.delta"
# Of a text part, in an event; a part of reasoning has none.
_NO_LOGPROBS = b',"logprobs":[]'


def _logprobs(scores: bytes) -> bytes:
    return b',"logprobs":[%b]' % scores


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a server, which stands behind a function of the model."""

    label: str
    server: ServerSettings
    name: str
    approval: bool  # a call waits for the client's


class ItemMaker:
    """Makes the items of a response. `base`: the number of those before the answer that is being generated; `tools`:
    functions whose calls run here.
    """

    def __init__(self, response_id: str) -> None:
        self._response = response_id.removeprefix("resp_")
        self.base = 0
        self.tools: dict[str, ServerTool] = {}

    def name(self, prefix: str, index: int) -> str:
        """The id of the item `index` of the response."""
        return f"{prefix}_{self._response}{index:04x}"

    def items(self, blocks: Sequence[Block], *, cut: bool) -> list[Item]:
        """The items of an answer at its end; of one that was cut the last is incomplete."""
        last = len(blocks) - 1
        return [
            self.item(blocks, index, "incomplete" if cut and index == last else "completed")
            for index in range(len(blocks))
        ]

    def item(self, blocks: Sequence[Block], index: int, status: str) -> Item:
        """The item of a block; `status`: in_progress, completed or incomplete. A call that runs here is in progress
        until it has run.
        """
        block, at = blocks[index], self.base + index
        item: Item = {"id": self.name(_PREFIX[block.kind], at), "status": status}
        if block.kind is PartKind.TEXT:
            return item | {"type": "message", "role": "assistant", "content": [part_of(block)]}
        if block.kind is PartKind.REASONING:
            return item | {"type": "reasoning", "summary": [], "content": [part_of(block)]}
        arguments, tool = block.text.decode(), self.tools.get(block.name)
        together = bool(self.tools) and any(before.kind is PartKind.CALL for before in blocks[:index])
        if tool is None:
            item["id"] += TOGETHER * together
            call = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
            return item | {"type": "function_call", **call}
        if tool.approval:
            return {
                "id": self.name("mcpr", at) + TOGETHER * together, "type": "mcp_approval_request",
                "server_label": tool.label, "name": tool.name, "arguments": arguments,
            }  # fmt: skip
        return self.call(at, tool.label, tool.name, arguments, together=together)

    def call(self, at: int, label: str, name: str, arguments: str, *, together: bool = False) -> Item:
        """A call that has not run yet."""
        return {
            "id": self.name("mcp", at) + TOGETHER * together, "type": "mcp_call", "status": "in_progress",
            "server_label": label, "name": name, "arguments": arguments, "approval_request_id": None,
            "output": None, "error": None,
        }  # fmt: skip


def part_of(block: Block) -> dict[str, Any]:
    """The one part of a message, or of reasoning."""
    if block.kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": block.text.decode()}
    scores: Any = msgspec.Raw(b"[%b]" % bytes(block.scores)) if block.scores else []
    return {"type": "output_text", "text": block.text.decode(), "annotations": [], "logprobs": scores}


def usage_of_response(run: HttpGeneration, block: int) -> ResponsesUsage:
    """Token counts so far; `block` are the tokens of a block of the prefix cache."""
    usage = run.usage()
    cached, details, thought = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details, 0
    if details is not UNSET and details.reasoning_tokens is not UNSET:
        thought = details.reasoning_tokens
    added = max(0, usage.prompt_tokens // block * block - cached) if block else 0
    return ResponsesUsage(
        usage.prompt_tokens, CachedInput(cached, added), usage.completion_tokens, ReasonedOutput(thought),
        usage.total_tokens,
    )  # fmt: skip


def usage_sum(before: ResponsesUsage | None, run: HttpGeneration, block: int) -> ResponsesUsage:
    """Token counts of the turns of a response, with those of its latest."""
    now = usage_of_response(run, block)
    if before is None:
        return now
    read, cached = before.input_tokens_details, now.input_tokens_details
    thought = before.output_tokens_details.reasoning_tokens + now.output_tokens_details.reasoning_tokens
    return ResponsesUsage(
        before.input_tokens + now.input_tokens,
        CachedInput(read.cached_tokens + cached.cached_tokens, read.cache_write_tokens + cached.cache_write_tokens),
        before.output_tokens + now.output_tokens, ReasonedOutput(thought), before.total_tokens + now.total_tokens,
    )  # fmt: skip


# Why a response is incomplete.
CUT = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}


def complete(body: ResponseBody, answer: BlockAnswer, run: HttpGeneration, block: int) -> ResponseBody:
    """The response at the end of its only turn."""
    cut = CUT.get(run.outputs[0].outputs[0].finish_reason or FinishReason.ABORT)
    items = ItemMaker(body.id).items(answer.blocks, cut=cut is not None)
    return finish(body, items, cut, usage_of_response(run, block))


def finish(
    body: ResponseBody, items: list[Item], cut: str | None, usage: ResponsesUsage | None
) -> ResponseBody:
    """The response at its end; `cut` says why it is incomplete, if it is."""
    body.status = "incomplete" if cut else "completed"
    body.incomplete_details = {"reason": cut} if cut else None
    body.completed_at = None if cut else int(time.time())
    body.output, body.usage = items, usage
    return body


class ResponseStream:
    """The events of a streamed response: a delta in, bytes out. Each event has the next number.

    `body` becomes the response at its end. `block`: tokens of a block of the prefix cache. `begun` are the events
    before all others. A response of several turns has a `maker`; others are complete with `last`. Texts that go past
    the reader have the `form`, if there is one. With `texts`, tokens come with their log-probabilities.
    """

    __slots__ = (
        "_around", "_block", "_body", "_form", "_maker", "_number", "_said", "_unsaid", "answer", "begun",
    )  # fmt: skip

    def __init__(
        self, body: ResponseBody, block: int, maker: ItemMaker | None = None, form: TextForm | None = None,
        texts: TokenTexts | None = None,
    ) -> None:  # fmt: skip
        self._body, self._block, self._form = body, block, form
        self._maker = maker or ItemMaker(body.id)
        self.answer = BlockAnswer(texts)
        self._unsaid: list[bytes] = []  # log-probabilities that no event has had
        self._number = 0
        rest = b',"response":' + _encode(body)
        self.begun = b"".join([self._event(f"response.{name}", rest) for name in ("created", "in_progress")])
        # of a delta of the open block, around its number and text; None for a block that is sent as a whole
        self._around: tuple[bytes, bytes] | None = None
        self._said: bytearray | None = None  # the text of the open message so far

    def begin_turn(self) -> None:
        """Another answer follows, whose items are behind those before."""
        self.answer, self._said = BlockAnswer(), None

    def chunk_of(self, _: int, delta: StreamDelta) -> bytes:
        """The events of a delta."""
        if scores := self.answer.score(delta):
            self._unsaid.append(scores)
        return self._steps(parts_of(delta))

    def direct(self, _: int, parts: Sequence[AnswerPart]) -> bytes:
        """The events of parts and nothing else."""
        if text := self.answer.grow(parts):
            return self._grown(text)
        return self._steps(parts)

    def text_of(self, text: str) -> tuple[bytes, bytes, bytes] | None:
        """The event of a text that continues the open message, in three pieces: the text is that in the middle."""
        said = self._said
        if said is None or self._around is None:
            return None
        said += text.encode()
        if (form := self._form) is not None and form.around is not None:
            before, behind = form.around
            return b"%b%d%b" % (before, next(form.numbers), behind), _encode(text), TEXT_END
        number, self._number = self._number, self._number + 1
        before, behind = self._around
        return b"%b%d%b" % (before, number, behind), _encode(text), b"}\n\n"

    def last(self, run: HttpGeneration) -> bytes:
        """The events after the last delta."""
        cut = run.outputs[0].outputs[0].finish_reason in CUT
        closed = self.close(cut=cut)
        return closed + self.finished(complete(self._body, self.answer, run, self._block))

    def close(self, *, cut: bool) -> bytes:
        """The events after the last delta of a turn."""
        status = "incomplete" if cut else "completed"
        return b"".join([self._step(step, status) for step in self.answer.steps((), ended=True)])

    def finished(self, body: ResponseBody) -> bytes:
        """The event at the end of all."""
        return self._event(f"response.{body.status}", b',"response":' + _encode(body))

    # ---- tools of servers

    def listing(self, at: int, item: Item) -> bytes:
        """The events before a server is asked for its tools."""
        return self._item("added", at, item) + self._told("mcp_list_tools.in_progress", at, item)

    def listed(self, at: int, item: Item) -> bytes:
        """The events when it has answered, or failed."""
        how = "failed" if item["error"] else "completed"
        return self._told(f"mcp_list_tools.{how}", at, item) + self._item("done", at, item)

    def whole_call(self, at: int, item: Item) -> bytes:
        """The events of a call that is known before it runs."""
        text = item["arguments"]
        return (
            self._item("added", at, item | {"arguments": ""})
            + self._told("mcp_call.in_progress", at, item)
            + self._told("mcp_call_arguments.delta", at, item, delta=text)
            + self._told("mcp_call_arguments.done", at, item, arguments=text)
        )

    def called(self, at: int, item: Item) -> bytes:
        """The events when a call has run, or will not run any more: the answer was cut."""
        how = {"completed": "completed", "failed": "failed"}.get(item["status"])
        told = self._told(f"mcp_call.{how}", at, item) if how else b""
        return told + self._item("done", at, item)

    def _item(self, change: str, at: int, item: Item) -> bytes:
        return self._event(
            f"response.output_item.{change}", b',"output_index":%d,"item":%b' % (at, _encode(item))
        )

    def _told(self, name: str, at: int, item: Item, **more: str) -> bytes:
        rest = self._place(item["id"], at, parted=False)
        for field, text in more.items():
            rest += b',"%b":%b' % (field.encode(), _encode(text))
        return self._event(f"response.{name}", rest)

    def _steps(self, parts: Iterable[AnswerPart]) -> bytes:
        return b"".join([self._step(step) for step in self.answer.steps(parts, ended=False)])

    def _event(self, name: str, rest: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        named = name.encode()
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d%b}\n\n' % (named, named, number, rest)

    def _step(self, step: BlockStep, status: str = "completed") -> bytes:
        """The events of a step. `status` is that of an item that it closes."""
        if step.change is BlockChange.GROW:
            return self._grown(step.text)
        index = len(self.answer.blocks) - 1
        return self._open(index) if step.change is BlockChange.OPEN else self._close(index, status)

    def _grown(self, text: str) -> bytes:
        """The event of a text that continues the open block."""
        if self._around is None:
            return b""
        number, self._number = self._number, self._number + 1
        before, behind = self._around
        if self._unsaid:
            behind = behind.replace(_NO_LOGPROBS, _logprobs(b",".join(self._unsaid)), 1)
            self._unsaid.clear()
        return b"%b%d%b%b}\n\n" % (before, number, behind, _encode(text))

    def _open(self, index: int) -> bytes:
        block, at = self.answer.blocks[index], self._maker.base + index
        item = self._maker.item(self.answer.blocks, index, "in_progress")
        kind = item["type"]
        self._said = block.text if block.kind is PartKind.TEXT else None
        if kind == "mcp_approval_request":
            self._around = None
            return b""
        parted = block.kind is not PartKind.CALL
        place = self._place(item["id"], at, parted=parted)
        name = (_MCP_DELTA if kind == "mcp_call" else _DELTA[block.kind]).encode()
        logprobs = _NO_LOGPROBS if block.kind is PartKind.TEXT else b""
        self._around = (
            b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name),
            place + logprobs + b',"delta":',
        )
        part = _encode(item["content"][0]) if parted else b""
        if parted:
            item["content"] = []
        added = self._item("added", at, item)
        if kind == "mcp_call":
            return added + self._told("mcp_call.in_progress", at, item)
        if not parted:
            return added
        return added + self._event("response.content_part.added", place + b',"part":' + part)

    def _close(self, index: int, status: str) -> bytes:
        block, at = self.answer.blocks[index], self._maker.base + index
        item = self._maker.item(self.answer.blocks, index, status)
        self._said = None
        if item["type"] == "mcp_approval_request":
            return self._item("added", at, item) + self._item("done", at, item)
        if item["type"] == "mcp_call":  # its end comes when it has run
            return self._told("mcp_call_arguments.done", at, item, arguments=item["arguments"])
        parted = block.kind is not PartKind.CALL
        place = self._place(item["id"], at, parted=parted)
        rest = self._grown("") if self._unsaid else b""
        text = _encode(block.text.decode())
        done = _DELTA[block.kind].replace(".delta", ".done")
        if parted:
            logprobs = _logprobs(bytes(block.scores)) if block.kind is PartKind.TEXT else b""
            ended = rest + self._event(done, place + logprobs + b',"text":' + text)
            ended += self._event("response.content_part.done", place + b',"part":' + _encode(part_of(block)))
        else:
            ended = self._event(done, place + b',"name":%b,"arguments":%b' % (_encode(block.name), text))
        return ended + self._item("done", at, item)

    @staticmethod
    def _place(item_id: str, index: int, *, parted: bool) -> bytes:
        """The fields that say where an event belongs."""
        content = b',"content_index":0' if parted else b""
        return b',"item_id":%b,"output_index":%d%b' % (_encode(item_id), index, content)
