"""Answers in Anthropic's form: a message with content blocks, whole and as the events of a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from quire.answers import AnswerPart, PartKind
from quire.engine.api import StreamDelta
from quire.outputs import CompletionOutput
from quire.server import pieces
from quire.server.dialects.anthropic_types import MessageUsage, ThoughtTokens
from quire.server.dialects.blocks import Block, BlockAnswer, BlockChange, BlockReader, BlockStep, parts_of
from quire.server.generation import HttpGeneration
from quire.types import FinishReason

_encode = msgspec.json.Encoder().encode
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_NO_INPUT = b"{}"
# The block that opens, and a delta before its text and behind it.
_OPENED = {
    PartKind.TEXT: b'{"type":"text","text":""}',
    PartKind.REASONING: b'{"type":"thinking","thinking":"","signature":""}',
}
_DELTAS = {
    PartKind.TEXT: b'{"type":"text_delta","text":',
    PartKind.REASONING: b'{"type":"thinking_delta","thinking":',
    PartKind.CALL: b'{"type":"input_json_delta","partial_json":',
}


class MessageHead(NamedTuple):
    """What is known of a message before its answer. `block`: tokens of a block of the prefix cache, if usage shall say
    what was added to it, else 0.
    """

    id: str
    model: str
    block: int


def usage_of(head: MessageHead, run: HttpGeneration) -> MessageUsage:
    """Token counts so far."""
    usage = run.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    whole = usage.prompt_tokens // head.block * head.block if head.block else 0
    added = max(0, whole - cached)
    made = MessageUsage(usage.prompt_tokens - cached - added, added, cached, usage.completion_tokens)
    details = usage.completion_tokens_details
    if details is not UNSET and details.reasoning_tokens is not UNSET:
        made.output_tokens_details = ThoughtTokens(details.reasoning_tokens)
    return made


def stop_fields(sample: CompletionOutput, *, called: bool) -> dict[str, str | None]:
    """Why a message ended."""
    if sample.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if sample.finish_reason is FinishReason.CONTENT_FILTER:
        return {"stop_reason": "refusal", "stop_sequence": None}
    if isinstance(sample.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


def signature_of(thinking: bytes) -> str:
    """A digest in place of Anthropic's signature: clients want one in every block of thinking."""
    return hashlib.sha256(thinking).hexdigest()


def message_pieces(head: MessageHead, run: HttpGeneration) -> Iterator[bytes]:
    """The JSON of an AnthropicMessage."""
    (output,), (answer,) = run.outputs, run.answers
    assert isinstance(answer, BlockAnswer)
    named = {"id": head.id, "type": "message", "role": "assistant", "model": head.model}
    ended = stop_fields(output.outputs[0], called=answer.called)
    return pieces.fields([
        *((name, pieces.value(given)) for name, given in named.items()),
        ("content", pieces.items(map(_block, answer.blocks))),
        *((name, pieces.value(given)) for name, given in ended.items()),
        ("usage", pieces.value(usage_of(head, run))),
    ])  # fmt: skip


def _block(block: Block) -> pieces.Pieces:
    if block.kind is PartKind.TEXT:
        return pieces.fields([("type", pieces.value("text")), ("text", pieces.text(block.text))])
    if block.kind is PartKind.REASONING:
        signature = pieces.value(signature_of(bytes(block.text)))
        named = [("type", pieces.value("thinking")), ("thinking", pieces.text(block.text))]
        return pieces.fields([*named, ("signature", signature)])
    named = [("type", pieces.value("tool_use")), ("id", pieces.value(block.call_id))]
    return pieces.fields([*named, ("name", pieces.value(block.name)), ("input", (_input(block.text),))])


def _input(arguments: bytearray) -> bytes:
    """The input of a call as an object; an empty one where the end of the answer cut the call."""
    try:
        msgspec.json.decode(arguments, type=dict)
    except msgspec.DecodeError:
        return _NO_INPUT
    return bytes(arguments)


def _event(name: bytes, data: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b"%b}\n\n' % (name, name, data)


class MessageStream:
    """The events of a streamed message: a delta in, bytes out."""

    def __init__(self, head: MessageHead) -> None:
        self._head, self._reader = head, BlockReader()
        self._digest = hashlib.sha256()
        self._pinged = False

    def first(self, run: HttpGeneration) -> bytes:
        """The event before all others: the message without its content."""
        usage = _encode(usage_of(self._head, run))
        return _event(
            b"message_start",
            b',"message":{"id":%b,"type":"message","role":"assistant","model":%b,"content":[],"stop_reason":null,'
            b'"stop_sequence":null,"usage":%b}' % (_encode(self._head.id), _encode(self._head.model), usage),
        )

    def chunk_of(self, _: int, delta: StreamDelta) -> bytes:
        """The events of a delta."""
        return self._parts(parts_of(delta))

    def direct(self, _: int, parts: Sequence[AnswerPart]) -> bytes:
        """The events of parts and nothing else."""
        return self._parts(parts)

    def around(self, _: int) -> tuple[bytes, bytes]:
        """The bytes before and after the JSON text of an answer that is nothing but text, once its block is open."""
        return self._delta(0, PartKind.TEXT), b"}}\n\n"

    def last(self, run: HttpGeneration) -> bytes:
        """The events after the last delta."""
        closed = b"".join(map(self._step, self._reader.end()))
        ended = _encode(stop_fields(run.outputs[0].outputs[0], called=self._reader.called))
        usage = _encode(usage_of(self._head, run))
        return (
            closed
            + _event(b"message_delta", b',"delta":%b,"usage":%b' % (ended, usage))
            + _event(b"message_stop", b"")
        )

    def _parts(self, parts: Sequence[AnswerPart]) -> bytes:
        return b"".join([self._step(step) for part in parts for step in self._reader.push(part)])

    @staticmethod
    def _delta(index: int, kind: PartKind) -> bytes:
        """A delta up to its text."""
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":' % index
            + _DELTAS[kind]
        )

    def _step(self, step: BlockStep) -> bytes:
        index = self._reader.count - 1
        if step.change is BlockChange.GROW:
            if step.kind is PartKind.REASONING:
                self._digest.update(step.text.encode())
            return b"%b%b}}\n\n" % (self._delta(index, step.kind), _encode(step.text))
        if step.change is BlockChange.OPEN:
            block = _OPENED.get(step.kind) or (
                b'{"type":"tool_use","id":%b,"name":%b,"input":{}}'
                % (_encode(step.call_id), _encode(step.text))
            )
            opened = _event(b"content_block_start", b',"index":%d,"content_block":%b' % (index, block))
            pinged, self._pinged = self._pinged, True
            return opened if pinged else opened + PING
        signed = b""
        if step.kind is PartKind.REASONING:
            signature = _encode(self._digest.hexdigest())
            self._digest = hashlib.sha256()
            signed = _event(
                b"content_block_delta",
                b',"index":%d,"delta":{"type":"signature_delta","signature":%b}' % (index, signature),
            )
        return signed + _event(b"content_block_stop", b',"index":%d' % index)
