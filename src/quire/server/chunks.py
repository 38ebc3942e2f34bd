"""Server-sent events of a streamed answer, made from byte templates: what repeats is encoded once a request."""

from __future__ import annotations

import functools

import msgspec

from quire.engine.api import StreamDelta
from quire.server.generation import finish_reason
from quire.server.responses import ChatLogprobs, CompletionLogprobs, TimingsBody, UsageBody

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Envelope(msgspec.Struct):
    """What every chunk and answer of one request says."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


@functools.cache  # of four: one object for all requests alike
def _plain_end(closing: bytes, end: bytes) -> bytes:
    return closing + b',"logprobs":null,"finish_reason":null' + end


class Chunks:
    """Chunks of one request. `opening` and `closing` stand around the text within a choice."""

    def __init__(self, envelope: Envelope, choices: int, *, chat: bool, usage: bool) -> None:
        head = b"data: " + _encode(envelope)[:-1] + b',"choices":['
        opening, self._closing = (b',"delta":{"content":', b"}") if chat else (b',"text":', b"")
        self._roles = [
            head
            + b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            % i
            for i in range(choices)
        ]
        self._starts = [head + b'{"index":%d' % i + opening for i in range(choices)]
        self._end = b'}],"usage":null}\n\n' if usage else b"}]}\n\n"
        self._plain_end = _plain_end(self._closing, self._end)
        self._head = head

    def role(self, choice: int) -> bytes:
        """The chunk that opens a message."""
        return self._roles[choice] + self._end[1:]

    def around(self, choice: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON of a text in a chunk of text and nothing else."""
        return self._starts[choice], self._plain_end

    def text(self, choice: int, text: str) -> bytes:
        """A chunk of text and nothing else."""
        return self._starts[choice] + _encode(text) + self._plain_end

    def full(
        self,
        choice: int,
        delta: StreamDelta,
        logprobs: ChatLogprobs | CompletionLogprobs | None,
        *,
        ids: bool,
    ) -> bytes:
        """A chunk with everything; `ids` adds the token ids."""
        parts = [
            self._starts[choice], _encode(delta.text), self._closing, b',"logprobs":', _encode(logprobs),
            b',"finish_reason":',
            _encode(None if delta.finish_reason is None else finish_reason(delta.finish_reason)),
            b',"stop_reason":', _encode(delta.stop_reason),
        ]  # fmt: skip
        if ids:
            parts += [b',"token_ids":', _encode(delta.token_ids)]
        return b"".join([*parts, self._end])

    def last(self, usage: UsageBody | None, timings: TimingsBody | None) -> bytes:
        """What follows the text: usage and timings when asked for, and the end mark."""
        if usage is None and timings is None:
            return DONE
        parts = [self._head + b"]"]
        if usage is not None:
            parts += [b',"usage":', _encode(usage)]
        if timings is not None:
            parts += [b',"timings":', _encode(timings)]
        return b"".join([*parts, b"}\n\n", DONE])


def error_event(body: bytes) -> bytes:
    """An error within a stream; nothing follows it."""
    return b"data: " + body + b"\n\n"
