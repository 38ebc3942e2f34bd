"""The assistant's message in OpenAI's form: whole, and as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from quire.answers import AnswerPart, PartKind
from quire.engine.api import StreamDelta
from quire.outputs import CompletionOutput
from quire.records import dataclass
from quire.server import pieces
from quire.server.chunks import Chunks
from quire.server.draft_marks import DraftMarks
from quire.server.generation import Answer, CallAnswer, finish_reason
from quire.server.logprob_bodies import TokenTexts, chat_logprobs, chat_pieces
from quire.server.responses import ChatDelta, FunctionDelta, ToolCallDelta
from quire.types import FinishReason

_SLICE_CHARS = 16 * 1024
_HOLE = "\ufdd0"  # a text that stands for another one
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How a request wants its message: with its `reasoning`, and with one `function_call` in the `older` form."""

    reasoning: bool = True
    older: bool = False

    def finish_reason(self, reason: FinishReason | None, *, called: bool) -> str:
        """Why a message ended, as OpenAI names it."""
        if called and reason is FinishReason.STOP:
            return "function_call" if self.older else "tool_calls"
        return finish_reason(reason)


def choice_pieces(
    sample: CompletionOutput, answer: Answer, form: MessageForm, texts: TokenTexts, *, ids: bool,
    marks: DraftMarks | None = None,
) -> pieces.Pieces:  # fmt: skip
    """The JSON of a responses.ChatChoice."""
    drafts = None if marks is None else marks.of_all(sample.index, len(sample.token_ids))
    table, reason = answer.logprobs, form.finish_reason(sample.finish_reason, called=bool(answer.calls))
    return pieces.fields([
        ("index", pieces.value(sample.index)),
        ("message", pieces.fields(_message(answer, form))),
        ("logprobs", pieces.value(None) if table is None else chat_pieces(table, texts)),
        ("finish_reason", pieces.value(reason)),
        ("stop_reason", pieces.value(sample.stop_reason)),
        *([("token_ids", pieces.numbers(sample.token_ids))] if ids else ()),
        *([("accepted_drafts", pieces.numbers(drafts))] if drafts is not None else ()),
    ])  # fmt: skip


def _message(answer: Answer, form: MessageForm) -> Iterator[tuple[str, pieces.Pieces]]:
    """The fields of a responses.ChatMessage."""
    beside = answer.calls or answer.reasoning
    yield "content", pieces.value(None) if beside and not answer.text else pieces.text(answer.text)
    yield "role", pieces.value("assistant")
    yield "refusal", pieces.value(None)
    if answer.reasoning and form.reasoning:
        yield "reasoning_content", pieces.text(answer.reasoning)
        yield "reasoning", pieces.text(answer.reasoning)
    if answer.calls and form.older:
        yield "function_call", _function(answer.calls[0])
    elif answer.calls:
        yield "tool_calls", pieces.items(map(_call, answer.calls))


def _call(call: CallAnswer) -> pieces.Pieces:
    named = ("id", pieces.value(call.id)), ("type", pieces.value("function"))
    return pieces.fields([*named, ("function", _function(call))])


def _function(call: CallAnswer) -> pieces.Pieces:
    return pieces.fields([("name", pieces.value(call.name)), ("arguments", pieces.text(call.arguments))])


class ChatEvents:
    """The events of a streamed conversation: a delta in, the bytes of its chunks out."""

    def __init__(
        self,
        chunks: Chunks,
        texts: TokenTexts,
        form: MessageForm,
        *,
        ids: bool,
        marks: DraftMarks | None = None,
    ) -> None:
        self._chunks, self._texts, self._form, self._ids, self._marks = chunks, texts, form, ids, marks
        self._whole = ids or marks is not None
        self._opened: set[int] = set()
        self._called: set[int] = set()
        self._around: dict[tuple[int, PartKind, int], tuple[bytes, ...]] = {}

    def chunk_of(self, choice: int, delta: StreamDelta) -> bytes:
        """The chunks of a delta; the first of a choice is preceded by one with its role."""
        if delta.parts is None:
            data = self._plain(choice, delta)
            null = False
        else:
            data = b"".join(self._parted(choice, delta, delta.parts))
            first = delta.parts[0].kind if delta.parts else None
            null = first is not PartKind.TEXT and (first is not None or delta.finish_reason is None)
        if choice not in self._opened and (data or delta.parts is None):
            self._opened.add(choice)
            data = self._chunks.role(choice, null=null) + data
        return data

    def direct(self, choice: int, parts: Sequence[AnswerPart]) -> bytes | None:
        """The chunks of parts and nothing else; None before the first chunk of a choice.

        Nearly all are one piece of text: what stands around such a piece is made once.
        """
        if choice not in self._opened:
            return None
        (part,) = parts if len(parts) == 1 else (None,)
        if part is None or part.kind is PartKind.CALL or len(part.text) > _SLICE_CHARS:
            bodies = [_encode(body) for part in parts for body in self._bodies(choice, part)]
            return b"".join([self._chunks.delta(choice, body) for body in bodies])
        key = choice, part.kind, part.call
        around = self._around.get(key)
        if around is None:
            around = self._around[key] = self._pieces_around(*key)
        return _encode(part.text).join(around)

    def _pieces_around(self, choice: int, kind: PartKind, call: int) -> tuple[bytes, ...]:
        """The chunk of a part, without its text wherever that stands."""
        bodies = self._bodies(choice, AnswerPart(kind, _HOLE, call))
        return tuple(
            b"".join([self._chunks.delta(choice, _encode(body)) for body in bodies]).split(_encode(_HOLE))
        )

    def _plain(self, choice: int, delta: StreamDelta) -> bytes:
        if delta.logprobs is None and delta.finish_reason is None and not self._whole:
            return self._chunks.text(choice, delta.text) if delta.text else b""
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._texts)
        return self._chunks.full(choice, delta, logprobs, ids=self._ids, marks=self._drafts(choice, delta))

    def _drafts(self, choice: int, delta: StreamDelta) -> list[int] | None:
        return None if self._marks is None else self._marks.of_next(choice, len(delta.token_ids))

    def _parted(self, choice: int, delta: StreamDelta, parts: list[AnswerPart]) -> Iterator[bytes]:
        """A chunk per part; what belongs to the whole delta is in the last. The end of a message has its own."""
        bodies = [_encode(body) for part in parts for body in self._bodies(choice, part)]
        if delta.finish_reason is not None or (
            not bodies and (delta.logprobs or (self._whole and delta.token_ids))
        ):
            bodies.append(b"{}")
        for body in bodies[:-1]:
            yield self._chunks.delta(choice, body)
        if not bodies:
            return
        reason, more = None, b""
        if delta.finish_reason is not None:
            reason = self._form.finish_reason(delta.finish_reason, called=choice in self._called)
            more += b',"stop_reason":' + _encode(delta.stop_reason)
        if self._ids:
            more += b',"token_ids":' + _encode(delta.token_ids)
        if (drafts := self._drafts(choice, delta)) is not None:
            more += b',"accepted_drafts":' + _encode(drafts)
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._texts)
        yield self._chunks.delta(choice, bodies[-1], logprobs, reason, more)

    def _bodies(self, choice: int, part: AnswerPart) -> Iterator[ChatDelta]:
        """A part as additions to a message, none of them longer than the chunks of other answers."""
        if part.kind is PartKind.CALL:
            self._called.add(choice)
        if part.kind is PartKind.REASONING and not self._form.reasoning:
            return
        for start in range(0, max(1, len(part.text)), _SLICE_CHARS):
            yield self._body(part, part.text[start : start + _SLICE_CHARS])

    def _body(self, part: AnswerPart, text: str) -> ChatDelta:
        """A part as one addition; the first piece of a call has its id, type and name."""
        if part.kind is PartKind.TEXT:
            return ChatDelta(content=text)
        if part.kind is PartKind.REASONING:
            return ChatDelta(reasoning_content=text, reasoning=text)
        opens = part.kind is PartKind.CALL
        function = FunctionDelta(name=text, arguments="") if opens else FunctionDelta(arguments=text)
        if self._form.older:
            return ChatDelta(function_call=function)
        if not opens:
            return ChatDelta(tool_calls=[ToolCallDelta(part.call, function=function)])
        return ChatDelta(tool_calls=[ToolCallDelta(part.call, part.call_id, "function", function)])
