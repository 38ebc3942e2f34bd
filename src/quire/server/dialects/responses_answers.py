"""Answers in the form of OpenAI's Responses: items, whole and as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from quire.answers import AnswerPart, PartKind
from quire.engine.api import StreamDelta
from quire.server.dialects.blocks import Block, BlockAnswer, BlockChange, BlockStep, parts_of
from quire.server.dialects.responses_types import (
    CachedInput,
    ReasonedOutput,
    ResponseBody,
    ResponsesUsage,
)
from quire.server.generation import HttpGeneration
from quire.types import FinishReason

_encode = msgspec.json.Encoder().encode
_PREFIX = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}
_DELTA = {
    PartKind.TEXT: "response.output_text.delta",
    PartKind.REASONING: "response.reasoning_text.delta",
    PartKind.CALL: "response.function_call_arguments.delta",
}
# Of a text part, in an event; a part of reasoning has none.
_NO_LOGPROBS = b',"logprobs":[]'


def item_of(response_id: str, index: int, block: Block, status: str) -> dict[str, Any]:
    """An item of the output; `status`: in_progress, completed or incomplete."""
    name = f"{_PREFIX[block.kind]}_{response_id.removeprefix('resp_')}{index:04x}"
    item: dict[str, Any] = {"id": name, "status": status}
    if block.kind is PartKind.TEXT:
        return item | {"type": "message", "role": "assistant", "content": [part_of(block)]}
    if block.kind is PartKind.REASONING:
        return item | {"type": "reasoning", "summary": [], "content": [part_of(block)]}
    call = {"call_id": block.call_id, "name": block.name, "arguments": block.text.decode()}
    return item | {"type": "function_call", **call}


def part_of(block: Block) -> dict[str, Any]:
    """The one part of a message, or of reasoning."""
    if block.kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": block.text.decode()}
    return {"type": "output_text", "text": block.text.decode(), "annotations": [], "logprobs": []}


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


# Why a response is incomplete.
_CUT = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}


def complete(body: ResponseBody, answer: BlockAnswer, run: HttpGeneration, block: int) -> ResponseBody:
    """The response at its end."""
    cut = _CUT.get(run.outputs[0].outputs[0].finish_reason or FinishReason.ABORT)
    body.status = "incomplete" if cut else "completed"
    body.incomplete_details = {"reason": cut} if cut else None
    body.completed_at = None if cut else int(time.time())
    last = len(answer.blocks) - 1
    body.output = [
        item_of(body.id, index, found, "incomplete" if cut and index == last else "completed")
        for index, found in enumerate(answer.blocks)
    ]
    body.usage = usage_of_response(run, block)
    return body


class ResponseStream:
    """The events of a streamed response: a delta in, bytes out. Each event has the next number.

    `body` becomes the response at its end. `block`: tokens of a block of the prefix cache.
    """

    def __init__(self, body: ResponseBody, block: int) -> None:
        self._body, self._block = body, block
        self._answer = BlockAnswer()
        self._number = 0
        rest = b',"response":' + _encode(body)
        self._begun = b"".join([self._event(f"response.{name}", rest) for name in ("created", "in_progress")])
        self._around: tuple[bytes, bytes] = (
            b"",
            b"",
        )  # of a delta of the open block, around its number and text

    def first(self, _: HttpGeneration) -> bytes:
        """The events before all others."""
        return self._begun

    def chunk_of(self, _: int, delta: StreamDelta) -> bytes:
        """The events of a delta."""
        return self._steps(parts_of(delta))

    def direct(self, _: int, parts: Sequence[AnswerPart]) -> bytes:
        """The events of parts and nothing else."""
        if text := self._answer.grow(parts):
            return self._grown(text)
        return self._steps(parts)

    def last(self, run: HttpGeneration) -> bytes:
        """The events after the last delta."""
        cut = run.outputs[0].outputs[0].finish_reason in _CUT
        closed = b"".join([
            self._step(step, "incomplete" if cut else "completed") for step in self._answer.steps((), ended=True)
        ])  # fmt: skip
        body = complete(self._body, self._answer, run, self._block)
        return closed + self._event(f"response.{body.status}", b',"response":' + _encode(body))

    def _steps(self, parts: Iterable[AnswerPart]) -> bytes:
        return b"".join([self._step(step) for step in self._answer.steps(parts, ended=False)])

    def _event(self, name: str, rest: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        named = name.encode()
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d%b}\n\n' % (named, named, number, rest)

    def _step(self, step: BlockStep, status: str = "completed") -> bytes:
        """The events of a step. `status` is that of an item that it closes."""
        if step.change is BlockChange.GROW:
            return self._grown(step.text)
        index = len(self._answer.blocks) - 1
        return self._open(index) if step.change is BlockChange.OPEN else self._close(index, status)

    def _grown(self, text: str) -> bytes:
        """The event of a text that continues the open block."""
        number, self._number = self._number, self._number + 1
        before, behind = self._around
        return b"%b%d%b%b}\n\n" % (before, number, behind, _encode(text))

    def _open(self, index: int) -> bytes:
        block = self._answer.blocks[index]
        item = item_of(self._body.id, index, block, "in_progress")
        parted = block.kind is not PartKind.CALL
        place = self._place(item["id"], index, parted=parted)
        name = _DELTA[block.kind].encode()
        logprobs = _NO_LOGPROBS if block.kind is PartKind.TEXT else b""
        self._around = (
            b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name),
            place + logprobs + b',"delta":',
        )
        part = _encode(item["content"][0]) if parted else b""
        if parted:
            item["content"] = []
        added = self._event(
            "response.output_item.added", b',"output_index":%d,"item":%b' % (index, _encode(item))
        )
        if not parted:
            return added
        return added + self._event("response.content_part.added", place + b',"part":' + part)

    def _close(self, index: int, status: str) -> bytes:
        block = self._answer.blocks[index]
        item = item_of(self._body.id, index, block, status)
        parted = block.kind is not PartKind.CALL
        place = self._place(item["id"], index, parted=parted)
        text = _encode(block.text.decode())
        done = _DELTA[block.kind].replace(".delta", ".done")
        if parted:
            logprobs = _NO_LOGPROBS if block.kind is PartKind.TEXT else b""
            ended = self._event(done, place + logprobs + b',"text":' + text)
            ended += self._event("response.content_part.done", place + b',"part":' + _encode(part_of(block)))
        else:
            ended = self._event(done, place + b',"name":%b,"arguments":%b' % (_encode(block.name), text))
        closed = b',"output_index":%d,"item":%b' % (index, _encode(item))
        return ended + self._event("response.output_item.done", closed)

    @staticmethod
    def _place(item_id: str, index: int, *, parted: bool) -> bytes:
        """The fields that say where an event belongs."""
        content = b',"content_index":0' if parted else b""
        return b',"item_id":%b,"output_index":%d%b' % (_encode(item_id), index, content)
