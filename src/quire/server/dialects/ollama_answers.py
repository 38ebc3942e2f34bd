"""Answers in Ollama's form: one JSON object, or a line of JSON for every piece of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.answers import AnswerPart, PartKind
from quire.engine.api import StreamDelta
from quire.server import pieces
from quire.server.dialects.blocks import parts_of
from quire.server.generation import CallAnswer, HttpGeneration
from quire.server.logprob_bodies import TokenTexts, chat_logprobs, token_pieces
from quire.types import FinishReason

LINES = b"application/x-ndjson"
_encode = msgspec.json.Encoder().encode
_GOES_ON = b',"done":false}\n'  # the end of every line but the last


class AnswerHead(NamedTuple):
    """What all lines of an answer repeat; `chat` answers have a message, others a response."""

    model: str
    created_at: str
    chat: bool

    def opening(self) -> bytes:
        """A line up to its content."""
        return b'{"model":%b,"created_at":%b,' % (_encode(self.model), _encode(self.created_at))


def ending(run: HttpGeneration) -> dict[str, Any]:
    """The fields that end an answer."""
    timings, usage = run.timings(), run.usage()
    cut = run.outputs[0].outputs[0].finish_reason is FinishReason.LENGTH
    return {
        "done": True,
        "done_reason": "length" if cut else "stop",
        "total_duration": _nanoseconds(timings.total_seconds),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(timings.prefill_seconds),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(timings.decode_seconds),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def loaded(head: AnswerHead, *, leaves: bool) -> bytes:
    """The answer to a request without a prompt, which asks to load the model: it is loaded, and `leaves` if asked."""
    content = b'"message":{"role":"assistant","content":""}' if head.chat else b'"response":""'
    return head.opening() + content + b',"done":true,"done_reason":"%b"}' % (b"unload" if leaves else b"load")


def answer_pieces(head: AnswerHead, texts: TokenTexts, run: HttpGeneration) -> Iterator[bytes]:
    """The JSON of an OllamaChatAnswer or OllamaGenerateAnswer."""
    (answer,) = run.answers
    thought = [("thinking", pieces.text(answer.reasoning))] if answer.reasoning else []
    if head.chat:
        calls = [("tool_calls", pieces.items((_call(i, call),) for i, call in enumerate(answer.calls)))]
        message = pieces.fields([
            ("role", pieces.value("assistant")),
            ("content", pieces.text(answer.text)),
            *thought,
            *(calls if answer.calls else ()),
        ])  # fmt: skip
        content = [("message", message)]
    else:
        content = [("response", pieces.text(answer.text)), *thought]
    scores = [] if answer.logprobs is None else [("logprobs", token_pieces(answer.logprobs, texts))]
    named = (("model", pieces.value(head.model)), ("created_at", pieces.value(head.created_at)))
    return pieces.fields(
        [*named, *content, *scores, *((name, pieces.value(given)) for name, given in ending(run).items())]
    )


def _call(index: int, call: CallAnswer) -> bytes:
    """A call; its arguments are an empty object where the end of the answer cut them."""
    try:
        msgspec.json.decode(call.arguments, type=dict)
        arguments = bytes(call.arguments)
    except msgspec.DecodeError:
        arguments = b"{}"
    named = _encode(call.id), index, _encode(call.name), arguments
    return b'{"id":%b,"function":{"index":%d,"name":%b,"arguments":%b}}' % named


class OllamaStream:
    """The lines of a streamed answer. A call is one line: it is sent when it is complete. Logprobs of the tokens of a
    delta are in its first line, or in one of their own.
    """

    def __init__(self, head: AnswerHead, texts: TokenTexts) -> None:
        self._head, self._texts = head, texts
        self._opening = head.opening()
        self._calls = 0
        self._call: CallAnswer | None = None

    def chunk_of(self, _: int, delta: StreamDelta) -> bytes:
        """The lines of a delta."""
        lines = b"".join(map(self._line, parts_of(delta)))
        if not delta.logprobs:
            return lines
        scores = _encode(chat_logprobs(delta.logprobs, self._texts).content)
        lines = lines or b'""'.join(self.around(0))
        # nothing else in a line is like this: quotes in a text are escaped
        return lines.replace(_GOES_ON, b',"logprobs":%b' % scores + _GOES_ON, 1)

    def direct(self, _: int, parts: Sequence[AnswerPart]) -> bytes:
        """The lines of parts and nothing else."""
        return b"".join(map(self._line, parts))

    def around(self, _: int) -> tuple[bytes, bytes]:
        """The bytes before and after the JSON text of an answer that is nothing but text."""
        if self._head.chat:
            return self._opening + b'"message":{"role":"assistant","content":', b"}" + _GOES_ON
        return self._opening + b'"response":', _GOES_ON

    def last(self, run: HttpGeneration) -> bytes:
        """The last lines."""
        content = b'"message":{"role":"assistant","content":""}' if self._head.chat else b'"response":""'
        ended = _encode(ending(run))[1:]
        return self._flush() + self._opening + content + b"," + ended + b"\n"

    def _line(self, part: AnswerPart) -> bytes:
        if part.kind is PartKind.ARGUMENTS:
            assert self._call is not None
            self._call.arguments += part.text.encode()
            return b""
        before = self._flush()
        if part.kind is PartKind.CALL:
            self._call = CallAnswer(part.call_id, part.text, bytearray())
            return before
        if not part.text:
            return before
        opening, closing = self.around(0)
        if part.kind is PartKind.TEXT:
            return before + opening + _encode(part.text) + closing
        return before + opening + b'"","thinking":' + _encode(part.text) + closing

    def _flush(self) -> bytes:
        """The line of the call that is complete."""
        if self._call is None:
            return b""
        call, self._call, index = self._call, None, self._calls
        self._calls += 1
        opening, closing = self.around(0)
        return opening + b'"","tool_calls":[' + _call(index, call) + b"]" + closing
