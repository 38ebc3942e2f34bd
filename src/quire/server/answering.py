"""What chat and completions share between the request's fields and the response's bytes."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from quire.engine.api import GenerateAsk, StreamDelta
from quire.server.chunks import Chunks, Envelope
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Body, Exchange
from quire.server.fields import Unsupported
from quire.server.generation import Run
from quire.server.requests import GenerationRequest
from quire.server.responses import PromptLogprobs, TimingsBody

T = TypeVar("T", bound=msgspec.Struct)
ChunkOf = Callable[[int, StreamDelta], bytes]

MAX_REQUEST_ID_CHARS = 128
_CHAT_KINDS = ("chat.completion", "chat.completion.chunk")
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def read_body(
    context: ServerContext, exchange: Exchange, kind: type[T], unsupported: Unsupported
) -> Body[T]:
    """The body as a `kind`, its fields known and supported. Raises ApiError."""
    config = context.config
    check = functools.partial(unsupported.check, refuse_unknown=config.unknown_fields == "refuse")
    return await exchange.json(kind, config.max_body_bytes, config.body_timeout, check)


def make_envelope(
    context: ServerContext, exchange: Exchange, body: GenerationRequest, prefix: str
) -> Envelope:
    """The id, model and fingerprint of an answer. Raises ApiError for an unknown model or an unfit request id.

    Two requests that bring the same request id are independent: it only names the response.
    """
    model = context.model(body.model)
    exchange.details["model"] = model
    given = body.request_id
    if given is not None and not (
        given.isascii() and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARS
    ):
        raise bad_request(
            "request_id", f"request_id: must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters"
        )
    name = f"{prefix}-{given or uuid.uuid4().hex}"
    kind = "text_completion" if prefix == "cmpl" else _CHAT_KINDS[bool(body.stream)]
    return Envelope(name, kind, int(time.time()), model, context.fingerprint())


def wants_timings(exchange: Exchange, body: GenerationRequest) -> bool:
    """Whether the answer is to say where the time went."""
    return bool(body.timings) or exchange.header(b"x-quire-timings").lower() in {"1", "true"}


def check_streaming(body: GenerationRequest) -> None:
    """Raise ApiError for stream options without a stream, as OpenAI does."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options: only allowed when stream is true")


def wants_usage(context: ServerContext, body: GenerationRequest) -> bool:
    """Whether a stream ends with usage."""
    asked = body.stream_options is not None and body.stream_options.include_usage
    return asked or context.config.enable_force_include_usage


async def run_whole(context: ServerContext, exchange: Exchange, asks: Sequence[GenerateAsk]) -> Run:
    """Generate to the end; a client that hangs up meanwhile ends it."""
    async with exchange.watch():
        with Run(context, exchange, asks) as run:
            await run.finish()
    return run


class EventStream:
    """Writes a streamed answer. The response starts with the first text, so that what fails before has a status."""

    def __init__(
        self, context: ServerContext, exchange: Exchange, body: GenerationRequest, chunks: Chunks
    ) -> None:
        self._context, self._exchange, self._chunks = context, exchange, chunks
        self._usage = wants_usage(context, body)
        self._timings = wants_timings(exchange, body)
        self._ids = bool(body.return_token_ids)

    async def write(self, asks: Sequence[GenerateAsk], chunk_of: ChunkOf) -> None:
        """Generate, and send chunk after chunk; several that are there at once go in one write."""
        exchange = self._exchange
        async with exchange.watch() as watch:
            self._context.watches.add(watch)
            try:
                with Run(self._context, exchange, asks) as run:
                    if len(run.streams) == 1:
                        await self._write_one(run, chunk_of)
                    else:
                        async for deltas in run.read():
                            await self._send(b"".join([chunk_of(choice, delta) for choice, delta in deltas]))
                    last = self._chunks.last(run.usage() if self._usage else None, self._timings_of(run))
                if (
                    not exchange.status
                ):  # nothing was generated: cannot happen with at least one token a sample
                    await exchange.start(200, _EVENT_STREAM)
                await exchange.write(last, more=False)
            finally:
                self._context.watches.discard(watch)

    async def _write_one(self, run: Run, chunk_of: ChunkOf) -> None:
        """One prompt's samples. Text is written in the moment it comes while the client keeps up; all else goes
        through here: what must wait for the client, each sample's first delta and its last, and what has more than
        text.
        """
        exchange, (stream,) = self._exchange, run.streams
        delivering = self._ids
        try:
            async for delta in stream:
                run.took(delta.index, delta)
                await self._send(chunk_of(delta.index, delta))
                if not delivering and exchange.status:
                    delivering = True
                    writer = exchange.direct_writer()
                    if writer is not None:
                        run.deliver(self._chunks.around, writer)
        finally:
            exchange.bytes_out += run.delivered()

    def _send(self, data: bytes) -> Awaitable[None]:
        if not self._exchange.status:
            return self._send_first(data)
        return self._exchange.write(data) if data else _nothing()

    async def _send_first(self, data: bytes) -> None:
        if data:
            await self._exchange.start(200, _EVENT_STREAM)
            await self._exchange.write(data)

    def _timings_of(self, run: Run) -> TimingsBody | None:
        return run.timings() if self._timings else None


async def _nothing() -> None:
    """A chunk that is empty."""


def optional(value: PromptLogprobs | None) -> PromptLogprobs | msgspec.UnsetType:
    """None left out of the answer."""
    return msgspec.UNSET if value is None else value
