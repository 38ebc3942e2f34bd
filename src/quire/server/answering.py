"""What chat and completions share, from the fields of a request to the bytes of its response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec

from quire.engine.api import GenerateAsk, StreamDelta
from quire.records import dataclass
from quire.server.chunks import Chunks, Envelope
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Exchange
from quire.server.generation import Answer, Deltas, EventsOf, HttpGeneration
from quire.server.pieces import Pieces, gathered, portions, value
from quire.server.request_memory import answer_costs
from quire.server.requests import GenerationRequest
from quire.types import RequestError

ChunkOf = Callable[[int, StreamDelta], bytes]

MAX_REQUEST_ID_CHARS = 128
_CHAT_KINDS = ("chat.completion", "chat.completion.chunk")
EVENTS = b"text/event-stream; charset=utf-8"


def make_envelope(
    context: ServerContext, exchange: Exchange, body: GenerationRequest, prefix: str
) -> Envelope:
    """The id, model and fingerprint of an answer. Raises ApiError for an unknown model or an invalid request id.

    Two requests with the same request id are independent: the id only appears in the response.
    """
    model = context.model(body.model)
    pooling = context.engine.card.pooling
    if pooling is not None:
        raise RequestError("model", f"this model is for the task {pooling.task}, and generates no text")
    exchange.details["model"] = model
    name = answer_id(prefix, body.request_id)
    kind = "text_completion" if prefix == "cmpl" else _CHAT_KINDS[bool(body.stream)]
    return Envelope(name, kind, int(time.time()), model, context.fingerprint())


def answer_id(prefix: str, given: str | None) -> str:
    """The id of an answer. Raises ApiError for an id that cannot be part of it."""
    if given is not None and not (
        given.isascii() and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARS
    ):
        raise bad_request(
            "request_id", f"request_id: must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters"
        )
    return f"{prefix}-{given or uuid.uuid4().hex}"


def envelope_fields(envelope: Envelope) -> list[tuple[str, Pieces]]:
    """An envelope as the first fields of an answer."""
    return [(name, value(given)) for name, given in msgspec.structs.asdict(envelope).items()]


def wants_timings(exchange: Exchange, body: GenerationRequest) -> bool:
    """Whether the answer includes timings."""
    return bool(body.timings) or exchange.header(b"x-quire-timings").lower() in {"1", "true"}


def check_streaming(body: GenerationRequest) -> None:
    """Raise ApiError for stream options without streaming, as OpenAI does."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options: only allowed when stream is true")


def wants_usage(context: ServerContext, body: GenerationRequest) -> bool:
    """Whether a stream ends with usage."""
    asked = body.stream_options is not None and body.stream_options.include_usage
    return asked or context.config.enable_force_include_usage


async def answer_whole(
    context: ServerContext,
    exchange: Exchange,
    asks: Sequence[GenerateAsk],
    pieces_of: Callable[[HttpGeneration], Iterator[bytes]],
    *,
    logprobs: str = "logprobs",
    answers: Callable[[], Answer] = Answer,
) -> None:
    """Generate everything, then answer with the JSON that `pieces_of` makes of it; `answers` holds the text of a choice
    until then. Generation ends early when the client hangs up or stops reading.
    """
    costs = answer_costs(
        asks, context.engine.card.max_model_len, unread=None, held_back=False,
        recorded=exchange.recorded is not None, logprobs=logprobs,
    )  # fmt: skip
    async with exchange.watch() as watch:
        async with HttpGeneration(context, exchange, asks, costs) as run:
            await run.finish(answers)
        with context.watched(watch):
            await exchange.respond_pieces(run.answer_size(), lambda: pieces_of(run))


def openai_end(
    context: ServerContext, exchange: Exchange, body: GenerationRequest, chunks: Chunks
) -> Callable[[HttpGeneration], bytes]:
    """What makes the end of a stream of chunks: usage and timings if the request wants them."""
    usage, timings = wants_usage(context, body), wants_timings(exchange, body)
    return lambda run: chunks.last(run.usage() if usage else None, run.timings() if timings else None)


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How an API writes a streamed answer: `first` makes what comes before all else, `chunk_of` the bytes of a delta of
    a choice, `last` the end.

    While the client keeps up, text is written past the reader: `around` returns the JSON before and after a text, and
    `direct` the events of parts (see HttpGeneration.deliver). Without `around`, text is a part too. `late` answers are
    not: each of their chunks has more than text. `kept` answers are held until their end, where they are repeated.
    `ended` is awaited before the end is sent.
    """

    chunk_of: ChunkOf
    last: Callable[[HttpGeneration], bytes]
    first: Callable[[HttpGeneration], bytes] | None = None
    around: Callable[[int], tuple[bytes, bytes]] | None = None
    direct: EventsOf | None = None
    late: bool = False
    kept: bool = False
    ended: Callable[[], Awaitable[None]] | None = None
    media: bytes = EVENTS


class AnswerStream:
    """Writes a streamed answer. The response starts with the first text, so that an earlier failure has a status."""

    def __init__(
        self, context: ServerContext, exchange: Exchange, form: StreamForm, *, logprobs: str = "logprobs"
    ) -> None:
        self._context, self._exchange, self._form = context, exchange, form
        self._logprobs = logprobs  # the name of the field that asked for them

    async def write(self, asks: Sequence[GenerateAsk]) -> None:
        """Generate and send chunk after chunk; chunks that are ready together go out in one write."""
        exchange = self._exchange
        async with exchange.watch() as watch:
            with self._context.watched(watch):
                async with HttpGeneration(self._context, exchange, asks, self._costs(asks)) as run:
                    if len(run.streams) == 1:
                        await self._write_one(run)
                    else:
                        async for deltas in run.read():
                            for some in gathered(_chunks(deltas, self._form.chunk_of)):
                                await self._send(run, some)
                    last = self._form.last(run)
                if not exchange.status:  # the answer has no text
                    await self._start(run)
                if self._form.ended is not None:
                    await self._form.ended()
                await exchange.write(last)
                await exchange.write(b"", more=False)

    def _costs(self, asks: Sequence[GenerateAsk]) -> dict[str, int]:
        exchange, context = self._exchange, self._context
        return answer_costs(
            asks, context.engine.card.max_model_len, unread=context.config.reader_tokens,
            held_back=exchange.holds_back, recorded=exchange.recorded is not None, kept=self._form.kept,
            logprobs=self._logprobs,
        )  # fmt: skip

    async def _write_one(self, run: HttpGeneration) -> None:
        """The samples of one prompt. While the client keeps up, text is written the moment it arrives. Everything else
        goes through this loop: output that waits for the client, the first and last delta of each sample, and deltas
        with more than text.
        """
        exchange, (stream,), form = self._exchange, run.streams, self._form
        delivering = form.late
        try:
            async for delta in stream:
                run.took(delta.index, delta)
                for part in portions(delta):
                    await self._send(run, form.chunk_of(delta.index, part))
                if not delivering and exchange.status:
                    delivering = True
                    writer = exchange.direct_writer()
                    if writer is not None:
                        run.deliver(form.around, writer, form.direct)
        finally:
            exchange.bytes_out += run.delivered()

    def _send(self, run: HttpGeneration, data: bytes) -> Awaitable[None]:
        if not self._exchange.status:
            return self._send_first(run, data)
        return self._exchange.write(data) if data else _nothing()

    async def _send_first(self, run: HttpGeneration, data: bytes) -> None:
        if data:
            await self._start(run)
            await self._exchange.write(data)

    async def _start(self, run: HttpGeneration) -> None:
        headers = [
            (b"content-type", self._form.media),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._exchange.start(200, headers)
        if self._form.first is not None:
            await self._exchange.write(self._form.first(run))


def _chunks(deltas: Deltas, chunk_of: ChunkOf) -> Iterator[bytes]:
    for choice, delta in deltas:
        for part in portions(delta):
            yield chunk_of(choice, part)


async def _nothing() -> None:
    """An empty chunk."""
