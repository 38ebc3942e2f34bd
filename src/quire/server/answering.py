"""What chat and completions share, from the fields of a request to the bytes of its response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from quire.answers import PromptProgress
from quire.engine.api import GenerateAsk, StreamDelta
from quire.records import dataclass
from quire.server.chunks import Chunks, Envelope
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Exchange
from quire.server.generation import Answer, ChunkOf, Deltas, EventsOf, HttpGeneration, TextOf, TokenOf
from quire.server.heartbeat import Heartbeat
from quire.server.pieces import Pieces, gathered, portions, value
from quire.server.request_memory import answer_costs
from quire.server.requests import GenerationRequest
from quire.server.responses import UsageBody
from quire.server.served import Served
from quire.types import RequestError

Send = Callable[[bytes], Awaitable[None]]

MAX_REQUEST_ID_CHARS = 128
MIN_PING_SECONDS, MAX_PING_SECONDS = 1, 3600
_CHAT_KINDS = ("chat.completion", "chat.completion.chunk")
EVENTS = b"text/event-stream; charset=utf-8"
_NO_USAGE = b',"usage":null}\n\n'
_encode = msgspec.json.Encoder().encode


def make_envelope(context: ServerContext, served: Served, body: GenerationRequest, prefix: str) -> Envelope:
    """The id, model and fingerprint of an answer. Raises ApiError for an invalid request id.

    Two requests with the same request id are independent: the id only appears in the response.
    """
    name = answer_id(prefix, body.request_id)
    kind = "text_completion" if prefix == "cmpl" else _CHAT_KINDS[bool(body.stream)]
    return Envelope(name, kind, int(time.time()), served.name, served.fingerprint(context.engine.card))


def generating_model(context: ServerContext, exchange: Exchange, asked: str | None) -> Served:
    """What a requested name stands for: the requests of this exchange are for it, and the answer says so. Raises
    ApiError for an unknown name, RequestError for a model that generates no text.
    """
    served = context.find(asked, exchange)
    if served.digest:
        exchange.held.keep(context.engine.keep_adapter(served.digest))
    return note_served(context, exchange, served)


def note_served(context: ServerContext, exchange: Exchange, served: Served) -> Served:
    """Have the requests of this exchange be for a version that it keeps; see generating_model."""
    card = context.engine.card
    if card.pooling is not None:
        raise RequestError("model", f"this model is for the task {card.pooling.task}, and generates no text")
    exchange.served, exchange.details["model"] = served, served.name
    exchange.add_headers([(b"x-quire-model-version", served.fingerprint(card).encode())])
    return served


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
    """Raise ApiError for options of a stream without streaming, as OpenAI does, and for an invalid one."""
    for name in ("stream_options", "return_progress", "sse_ping_interval", "resumed_output"):
        if getattr(body, name) not in (None, False) and not body.stream:
            raise bad_request(name, f"{name}: only allowed when stream is true")
    options = body.stream_options
    if options is not None and options.include_obfuscation:
        raise bad_request(
            "stream_options.include_obfuscation",
            "stream_options.include_obfuscation: must be false; events are not padded",
            "unsupported_parameter",
        )
    seconds = body.sse_ping_interval
    if seconds is not None and seconds not in {-1, 0} and not MIN_PING_SECONDS <= seconds <= MAX_PING_SECONDS:
        raise bad_request(
            "sse_ping_interval",
            f"sse_ping_interval: {seconds:g} is not in [{MIN_PING_SECONDS}, {MAX_PING_SECONDS}]; -1 or 0 for no pings",
        )


def ping_seconds(body: GenerationRequest) -> float | None:
    """Seconds between the pings of a stream, if the request says so."""
    return None if body.sse_ping_interval is None else max(0.0, body.sse_ping_interval)


def wants_usage(context: ServerContext, body: GenerationRequest) -> bool:
    """Whether a stream ends with usage."""
    asked = body.stream_options is not None and bool(body.stream_options.include_usage)
    return asked or context.config.enable_force_include_usage


def with_running_usage(context: ServerContext, body: GenerationRequest, form: StreamForm) -> StreamForm:
    """A form of chunks, with the usage so far in each of them if the request wants that. Raises ApiError."""
    if body.stream_options is None or not body.stream_options.continuous_usage_stats:
        return form
    if not wants_usage(context, body):
        name = "stream_options.continuous_usage_stats"
        raise bad_request(name, f"{name}: needs include_usage")
    usage = _RunningUsage(form.chunk_of)
    return replace(form, chunk_of=usage.chunk_of, begun=usage.begun, whole=True)


class _RunningUsage:
    """Puts the usage so far in place of the null in chunks."""

    def __init__(self, chunk_of: ChunkOf) -> None:
        self._chunk_of, self._tokens = chunk_of, 0
        self._run: HttpGeneration | None = None

    def begun(self, run: HttpGeneration) -> None:
        """The run whose deltas will come."""
        self._run = run

    def chunk_of(self, choice: int, delta: StreamDelta) -> bytes:
        """The chunks of a delta."""
        self._tokens += len(delta.token_ids)
        data = self._chunk_of(choice, delta)
        if not data or self._run is None:
            return data
        made = self._run.usage()
        prompt = made.prompt_tokens
        usage = UsageBody(prompt, self._tokens, prompt + self._tokens, made.prompt_tokens_details)
        # nothing else in a chunk ends like this: line breaks in a text are escaped
        return data.replace(_NO_USAGE, b',"usage":%b}\n\n' % _encode(usage))


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
    """How an API writes a streamed answer: `opening` comes before all else, or what `first` makes; `chunk_of` makes the
    bytes of a delta of a choice, `last` the end.

    While the client keeps up, text is written past the reader: `around` returns the JSON before and after a text, and
    `direct` the events of parts, `text_of` that of most texts (see HttpGeneration.deliver). Without `around`, text is a
    part too. Of `whole` answers each chunk has more than text: `chunk_of` makes them all, and `token_of` those of most
    tokens. `kept` answers are held until their end, where they are repeated. `ended` is awaited before the end is sent.
    `begun` is told of the run before its first delta. `turn` is awaited with None and then with each generation: it
    says what is asked next, nothing at the end, and may send bytes meanwhile. `progress` makes what says how far the
    prompt of a choice is; `ping` keeps the connection open while there is nothing to say.
    """

    chunk_of: ChunkOf
    last: Callable[[HttpGeneration], bytes]
    first: Callable[[HttpGeneration], bytes] | None = None
    around: Callable[[int], tuple[bytes, bytes]] | None = None
    direct: EventsOf | None = None
    whole: bool = False
    token_of: TokenOf | None = None
    text_of: TextOf | None = None
    kept: bool = False
    ended: Callable[[], Awaitable[None]] | None = None
    begun: Callable[[HttpGeneration], None] | None = None
    turn: Callable[[HttpGeneration | None, Send], Awaitable[Sequence[GenerateAsk]]] | None = None
    media: bytes = EVENTS
    opening: bytes = b""
    progress: Callable[[int, PromptProgress], bytes] | None = None
    ping: bytes = b": ping\n\n"


class AnswerStream:
    """Writes a streamed answer. The response starts with the first text, ping or progress of the prompt, so that an
    earlier failure has a status. A ping follows after every `ping_seconds` without anything else, by default the
    server's.
    """

    def __init__(
        self, context: ServerContext, exchange: Exchange, form: StreamForm, *, logprobs: str = "logprobs",
        ping_seconds: float | None = None,
    ) -> None:  # fmt: skip
        self._context, self._exchange, self._form = context, exchange, form
        self._logprobs = logprobs  # the name of the field that asked for them
        seconds = context.config.sse_ping_interval if ping_seconds is None else ping_seconds
        self._ping_seconds = 0.0 if exchange.holds_back or not form.ping else seconds
        self._silent = False  # a ping is due
        self._begun = False  # there was text, or an event before it

    async def write(self, asks: Sequence[GenerateAsk] = ()) -> None:
        """Generate and send chunk after chunk; chunks that are ready together go out in one write."""
        exchange = self._exchange
        async with exchange.watch() as watch:
            with self._context.watched(watch):
                if self._form.turn is not None:
                    asks = await self._pinging(self._form.turn(None, self._send_now))
                while asks:
                    run = await self._generate(asks)
                    asks = ()
                    if self._form.turn is not None:
                        asks = await self._pinging(self._form.turn(run, self._send_now))
                last = self._form.last(run)
                if not exchange.status:  # the answer has no text
                    await self._start(run)
                if self._form.ended is not None:
                    await self._form.ended()
                await exchange.write(last)
                await exchange.write(b"", more=False)

    async def _generate(self, asks: Sequence[GenerateAsk]) -> HttpGeneration:
        async with HttpGeneration(self._context, self._exchange, asks, self._costs(asks)) as run:
            if self._form.begun is not None:
                self._form.begun(run)
            with self._heartbeat(run):
                if len(run.streams) == 1:
                    await self._write_one(run)
                else:
                    await self._write_several(run)
        return run

    async def _pinging(self, work: Awaitable[Sequence[GenerateAsk]]) -> Sequence[GenerateAsk]:
        """Wait between two generations; a stream that has begun says that it lives."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._ping_seconds or None))[0]:
                if self._exchange.status and not self._exchange.blocked():
                    await self._exchange.write(self._form.ping)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return task.result()

    async def _send_now(self, data: bytes) -> None:
        self._begun = True
        if not self._exchange.status:
            await self._start(None)
        await self._exchange.write(data)

    def _heartbeat(self, run: HttpGeneration) -> Heartbeat:
        """Has the reader wake up for a ping. While the client does not read, no ping is added to what it has left."""
        exchange = self._exchange

        def beat() -> None:
            if not exchange.blocked():
                self._silent = True
                run.nudge()

        return Heartbeat(self._ping_seconds, lambda: exchange.bytes_out + run.delivered(), beat)

    def _costs(self, asks: Sequence[GenerateAsk]) -> dict[str, int]:
        exchange, context = self._exchange, self._context
        return answer_costs(
            asks, context.engine.card.max_model_len, unread=context.config.reader_tokens,
            held_back=exchange.holds_back, recorded=exchange.recorded is not None, kept=self._form.kept,
            logprobs=self._logprobs,
        )  # fmt: skip

    async def _write_one(self, run: HttpGeneration) -> None:
        """The samples of one prompt. While the client keeps up, output is written the moment it arrives. The rest goes
        through this loop: what waits for the client, and the first and last delta of each sample.
        """
        exchange, (stream,), form = self._exchange, run.streams, self._form
        chunk_of, delivering = form.chunk_of if form.whole or run.scored else None, False
        try:
            async for delta in stream:
                run.took(delta.index, delta)
                if self._silent or delta.progress is not None:
                    await self._send_beside(run, delta.index, delta.progress)
                for part in portions(delta):
                    await self._send(run, form.chunk_of(delta.index, part))
                if not delivering and self._begun:
                    delivering = True
                    writer = exchange.direct_writer()
                    if writer is not None:
                        run.deliver(
                            writer, around=form.around, events_of=form.direct, chunk_of=chunk_of,
                            token_of=form.token_of, text_of=form.text_of,
                        )  # fmt: skip
        finally:
            exchange.bytes_out += run.delivered()

    async def _write_several(self, run: HttpGeneration) -> None:
        """The samples of several prompts."""
        async for deltas in run.read():
            for choice, delta in deltas:
                if self._silent or delta.progress is not None:
                    await self._send_beside(run, choice, delta.progress)
            for some in gathered(_chunks(deltas, self._form.chunk_of)):
                await self._send(run, some)

    def _send(self, run: HttpGeneration, data: bytes) -> Awaitable[None]:
        if not self._begun:
            return self._send_first(run, data)
        return self._exchange.write(data) if data else _nothing()

    async def _send_first(self, run: HttpGeneration, data: bytes) -> None:
        if data:
            self._begun = True
            if not self._exchange.status:
                await self._start(run)
            await self._exchange.write(data)

    async def _send_beside(self, run: HttpGeneration, choice: int, progress: PromptProgress | None) -> None:
        """Send what is not part of the answer: how far its prompt is, or else a ping."""
        self._silent, data = False, self._form.ping
        if progress is not None and self._form.progress is not None:
            data = self._form.progress(choice, progress)
        if not self._exchange.status:
            await self._start(run)
        await self._exchange.write(data)

    async def _start(self, run: HttpGeneration | None) -> None:
        headers = [
            (b"content-type", self._form.media),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._exchange.start(200, headers)
        if self._form.opening:
            await self._exchange.write(self._form.opening)
        if self._form.first is not None and run is not None:
            await self._exchange.write(self._form.first(run))


def _chunks(deltas: Deltas, chunk_of: ChunkOf) -> Iterator[bytes]:
    for choice, delta in deltas:
        for part in portions(delta):
            yield chunk_of(choice, part)


async def _nothing() -> None:
    """An empty chunk."""
