"""Server-sent events of a streamed answer, made from byte templates: repeated parts are encoded once per request."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from quire.answers import PromptProgress
from quire.engine.api import StreamDelta
from quire.server.generation import finish_reason
from quire.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptProgressBody,
    TimingsBody,
    UsageBody,
)

DONE = b"data: [DONE]\n\n"
_NO_DELTA = b',"delta":{"role":"assistant","content":null}'
_NO_TEXT = b',"text":""'
_PROGRESS = b',"logprobs":null,"finish_reason":null}],"prompt_progress":'
_encode = msgspec.json.Encoder().encode


class Envelope(msgspec.Struct):
    """The fields that every chunk and answer of one request repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


@functools.cache  # at most four values: all requests share them
def _plain_end(closing: bytes, end: bytes) -> bytes:
    return closing + b',"logprobs":null,"finish_reason":null' + end


class Chunks:
    """Chunks of one request. `opening` and `closing` enclose the text within a choice; `dropped` goes into the last."""

    def __init__(
        self, envelope: Envelope, choices: int, *, chat: bool, usage: bool, dropped: Sequence[str] = ()
    ) -> None:
        head = b"data: " + _encode(envelope)[:-1] + b',"choices":['
        opening, self._closing = (b',"delta":{"content":', b"}") if chat else (b',"text":', b"")
        self._starts = [head + b'{"index":%d' % i + opening for i in range(choices)]
        self._progress = [
            head + b'{"index":%d' % i + (_NO_DELTA if chat else _NO_TEXT) + _PROGRESS for i in range(choices)
        ]
        self._end = b'}],"usage":null}\n\n' if usage else b"}]}\n\n"
        self._plain_end = _plain_end(self._closing, self._end)
        self._head = head
        self._dropped = dropped

    def role(self, choice: int, *, null: bool = False) -> bytes:
        """The chunk that opens a message; its content is `null` before reasoning and calls, else an empty text."""
        return self.delta(choice, b'{"role":"assistant","content":%s}' % (b"null" if null else b'""'))

    def delta(
        self,
        choice: int,
        delta: bytes,
        logprobs: ChatLogprobs | None = None,
        reason: str | None = None,
        more: bytes = b"",
    ) -> bytes:
        """A chunk with any delta, and `more` fields of the choice, in JSON."""
        parts = [
            self._head, b'{"index":%d,"delta":' % choice, delta, b',"logprobs":', _encode(logprobs),
            b',"finish_reason":', _encode(reason), more,
        ]  # fmt: skip
        return b"".join([*parts, self._end])

    def progress(self, choice: int, progress: PromptProgress) -> bytes:
        """A chunk without text that says how much of a prompt is computed, in llama-server's form."""
        total, cache, processed, seconds = progress
        body = PromptProgressBody(total, cache, processed, seconds * 1000)
        return self._progress[choice] + _encode(body) + b"}\n\n"

    def around(self, choice: int) -> tuple[bytes, bytes]:
        """The bytes before and after the JSON text in a chunk with text only."""
        return self._starts[choice], self._plain_end

    def text(self, choice: int, text: str) -> bytes:
        """A chunk with text only."""
        return self._starts[choice] + _encode(text) + self._plain_end

    def full(
        self,
        choice: int,
        delta: StreamDelta,
        logprobs: ChatLogprobs | CompletionLogprobs | None,
        *,
        ids: bool,
        marks: Sequence[int] | None = None,
    ) -> bytes:
        """A chunk with all fields; `ids` adds the token ids, and `marks` are positions of accepted drafts."""
        parts = [
            self._starts[choice], _encode(delta.text), self._closing, b',"logprobs":', _encode(logprobs),
            b',"finish_reason":',
            _encode(None if delta.finish_reason is None else finish_reason(delta.finish_reason)),
            b',"stop_reason":', _encode(delta.stop_reason),
        ]  # fmt: skip
        if ids:
            parts += [b',"token_ids":', _encode(delta.token_ids)]
        if marks is not None:
            parts += [b',"accepted_drafts":', _encode(marks)]
        return b"".join([*parts, self._end])

    def last(self, usage: UsageBody | None, timings: TimingsBody | None) -> bytes:
        """The end of the stream: usage and timings if requested, dropped keywords if any, and the end mark."""
        if usage is None and timings is None and not self._dropped:
            return DONE
        parts = [self._head + b"]"]
        if usage is not None:
            parts += [b',"usage":', _encode(usage)]
        if timings is not None:
            parts += [b',"timings":', _encode(timings)]
        if self._dropped:
            parts += [b',"dropped_keywords":', _encode(self._dropped)]
        return b"".join([*parts, b"}\n\n", DONE])
