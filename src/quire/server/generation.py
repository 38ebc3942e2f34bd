"""The engine's streams behind one HTTP request: admitted, read and ended together."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from quire.answers import AnswerPart, PartKind, Timings
from quire.engine.api import GenerateAsk, Stream, StreamDelta
from quire.logprobs import LogprobTable
from quire.outputs import RequestOutput
from quire.records import dataclass
from quire.server.context import ServerContext
from quire.server.errors import DEGRADED, ApiError
from quire.server.exchange import ChunkPiece, ChunkWriter, Exchange
from quire.server.log_marks import tell_refused
from quire.server.pieces import is_portion
from quire.server.rate_limits import TokenCharge
from quire.server.responses import CompletionTokensDetails, PromptTokensDetails, TimingsBody, UsageBody
from quire.types import FinishReason, QuireError

Deltas = Sequence[tuple[int, StreamDelta]]
# The events of parts of a choice; None for those that only a reader can deliver.
EventsOf = Callable[[int, Sequence[AnswerPart]], bytes | None]
# The events of a delta of a choice.
ChunkOf = Callable[[int, StreamDelta], bytes]
# The event of a token of a choice, with its text and log-probability, in three pieces; None if `ChunkOf` must make it.
TokenOf = Callable[[int, str, int, float | None], tuple[ChunkPiece, ChunkPiece, ChunkPiece] | None]
# The event of a text of an answer that is read in parts, likewise; None if `EventsOf` must make it.
TextOf = Callable[[str], tuple[ChunkPiece, ChunkPiece, ChunkPiece] | None]

_LOGPROB_BYTES = 64
_encode = msgspec.json.Encoder().encode
_REASONS = {
    FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort",
    FinishReason.CONTENT_FILTER: "content_filter",
}  # fmt: skip


class HttpGeneration:
    """The samples of one request: choice p·n + i is sample i of prompt p.

    Use it as a context: however it ends, streams that still run are cancelled and the request is counted. Entering
    waits for the memory of the answer, whose worst case is `costs` (see request_memory.answer_costs).
    """

    __slots__ = (
        "_asks", "_charge", "_context", "_costs", "_exchange", "_room", "_timings", "_tracks", "answers", "choices",
        "samples", "streams",
    )  # fmt: skip

    def __init__(
        self, context: ServerContext, exchange: Exchange, asks: Sequence[GenerateAsk], costs: dict[str, int]
    ) -> None:
        self.samples = asks[0].request.params.n
        self.choices = self.samples * len(asks)
        self.streams: list[Stream] = []
        self.answers: list[Answer] = []
        self._room = 0  # bytes of text for which memory was taken
        self._context, self._exchange, self._asks, self._costs = context, exchange, asks, costs
        self._charge: TokenCharge | None = None
        self._timings: TimingsBody | None = None
        self._tracks = [ChoiceStream(context.metrics.observe_gap) for _ in range(self.choices)]

    async def __aenter__(self) -> HttpGeneration:
        """Admit every prompt, or none. Raises what Engine.generate and RequestMemory.take_answer raise."""
        exchange = self._exchange
        exchange.compiled = time.monotonic()
        try:
            self._exchange.held.give(self._context.memory.work)  # no longer needed: the prompts are token ids
            self._charge = await self._context.tenants.charge(self._exchange, self._asks)
            await self._context.memory.take_answer(self._exchange.held, self._asks, self._costs)
            exchange.admitted = time.monotonic()
            for ask in self._asks:
                exchange.asked.append(ask.request.request_id)
                self._context.owners.add(exchange, ask.request.request_id)
            hooks = self._context.hooks
            if steps := self._context.engine.degraded:
                self._exchange.add_headers(
                    [(DEGRADED, ", ".join(map(str, steps)).encode("latin-1", "replace"))]
                )
            for ask in self._asks:
                stream = self._context.engine.generate(ask)
                self.streams.append(stream if hooks is None else hooks.wrap(stream))
        except BaseException as error:
            for stream in self.streams:
                stream.cancel()
            if isinstance(error, QuireError):
                tell_refused(self._context.engine, self._asks, error)
            self._context.tenants.settle(self._exchange, self._charge, 0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self.streams:
            if not stream.output.finished:
                stream.cancel()
        used = sum(output.usage.prompt_tokens + output.usage.completion_tokens for output in self.outputs)
        self._context.tenants.settle(self._exchange, self._charge, used)
        self._context.metrics.count(self._exchange, self._asks, self.outputs)
        self._note()

    @property
    def scored(self) -> bool:
        """Whether tokens come with log-probabilities."""
        return self._asks[0].request.params.logprobs is not None

    @property
    def outputs(self) -> list[RequestOutput]:
        """The output of each prompt so far."""
        return [stream.output for stream in self.streams]

    async def read(self) -> AsyncIterator[Deltas]:
        """All deltas that are ready, of any choice. Raises ApiError for a failed sample, and the errors of iterating a
        Stream.
        """
        merged = _Merged(self.streams, self.samples, self.took)
        try:
            while deltas := await merged.take():
                yield deltas
        finally:
            await merged.close()

    async def finish(self, answers: Callable[[], Answer]) -> list[RequestOutput]:
        """Read to the end; returns the outputs and fills `answers` with the text of each choice."""
        self.answers = [answers() for _ in range(self.choices)]
        self._room = self._costs["max_tokens"]
        if self.choices == 1:
            async for delta in self.streams[0]:
                self.took(0, delta)
        else:
            async for _ in self.read():
                pass
        return self.outputs

    def took(self, choice: int, delta: StreamDelta) -> None:
        """Record a delta of a choice. Raises ApiError for a failed sample."""
        if self.answers:
            self._room -= self.answers[choice].add(delta)
            if self._room < 0:
                message = (
                    "the text of the answer exceeds the memory reserved for it: its tokens are unusually long"
                )
                raise ApiError(500, message, code="text_too_long")
        if (
            delta.token_ids and self.streams[choice // self.samples].output.timings.first_token
        ):  # not given alone
            now, track = time.monotonic(), self._tracks[choice]
            if track.last:
                track.observe(now - track.last)
            elif not any(track.last for track in self._tracks):
                self._context.metrics.first_token.observe(now - self._exchange.turn)
            track.last = now
        if delta.finish_reason is FinishReason.ERROR:
            raise ApiError(500, "the model produced NaN or infinite logits", code="numerical_error")
        if delta.finish_reason is FinishReason.NO_TOKEN:
            message = "no token can be sampled: the model gives probability 0 to every allowed token"
            raise ApiError(400, message, code="no_token_left")
        if delta.finish_reason is FinishReason.GRAMMAR_DEAD_END:
            message = (
                "no token can be sampled: the grammar and the other parameters of the request allow none"
            )
            raise ApiError(400, message, code="grammar_dead_end")
        if delta.finish_reason is FinishReason.GRAMMAR_LIMIT:
            message = "the grammar of the answer exceeded its limit of time or memory"
            raise ApiError(400, message, code="grammar_limit")

    def deliver(
        self,
        writer: ChunkWriter,
        *,
        around: Callable[[int], tuple[bytes, bytes]] | None = None,
        events_of: EventsOf | None = None,
        chunk_of: ChunkOf | None = None,
        token_of: TokenOf | None = None,
        text_of: TextOf | None = None,
    ) -> None:
        """From now on write the text of the only prompt's samples the moment it arrives, whenever `writer` accepts it.

        `around` returns the JSON before and after the text of a choice in an event, `events_of` the events of parts;
        without `around`, a text is a part. With `chunk_of`, it makes the events of all deltas, and `token_of` those of
        most tokens. `text_of` makes the event of a text that continues the text of the only choice.
        """
        for choice, track in enumerate(self._tracks):
            track.parted, track.chunk_of, track.whole = around is None, chunk_of, chunk_of is not None
            track.token_of, track.text_of = token_of, text_of
            if around is not None:
                track.opening, track.closing = around(choice)
            track.choice, track.events_of, track.writer = choice, events_of, writer
        self.streams[0].deliver_to(self._tracks)

    def nudge(self) -> None:
        """Give a reader that waits a delta with nothing in it."""
        for stream in self.streams:
            if not stream.output.finished:
                stream.nudge()
                return

    def delivered(self) -> int:
        """Bytes written by `deliver`."""
        return sum(track.written for track in self._tracks)

    def _note(self) -> None:
        usage = self.usage()
        exchange, samples = self._exchange, [sample for output in self.outputs for sample in output.outputs]
        exchange.timings, exchange.params = self._latest(), self._asks[0].request.params
        exchange.finish_reasons = [str(sample.finish_reason) for sample in samples if sample.finish_reason]
        exchange.details |= {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        }

    def prompt_logprobs(self, prompt: int) -> LogprobTable:
        """Logprobs of the tokens of a prompt after the `unscored` ones; empty unless requested."""
        found = self.outputs[prompt].prompt_logprobs
        return found if isinstance(found, LogprobTable) else LogprobTable()

    def unscored(self, prompt: int) -> int:
        """How many tokens at the start of a prompt get no logprobs: at least the first."""
        tokens = self.outputs[prompt].usage.prompt_tokens
        return tokens - self._asks[0].request.params.scored_tokens(tokens)

    def usage(self) -> UsageBody:
        """Token counts so far, over all prompts."""
        counts = [output.usage for output in self.outputs]
        prompt = sum(c.prompt_tokens for c in counts)
        completion = sum(c.completion_tokens for c in counts)
        cached = sum(c.cached_tokens for c in counts)
        usage = UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))
        reading, details = self._asks[0].reading, CompletionTokensDetails()
        if reading is not None and reading.regions.spec.reasoning is not None:
            details.reasoning_tokens = sum(c.reasoning_tokens for c in counts)
        if self._asks[0].request.prediction is not None:
            details.accepted_prediction_tokens = sum(c.accepted_prediction_tokens for c in counts)
            details.rejected_prediction_tokens = sum(c.rejected_prediction_tokens for c in counts)
        if details != CompletionTokensDetails():
            usage.completion_tokens_details = details
        acceptance = self._context.engine.card.acceptance
        if acceptance != "same":
            usage.speculation = acceptance
        return usage

    def answer_size(self) -> int:
        """Approximate size in bytes of a complete answer, from its text, ids and logprobs: what it costs to make."""
        params, usage = self._asks[0].request.params, self.usage()
        generated = 0 if params.logprobs is None else usage.completion_tokens * (1 + params.logprobs)
        scored = sum(params.scored_tokens(output.usage.prompt_tokens) for output in self.outputs)
        prompt = scored * (1 + (params.prompt_logprobs or 0))
        text = sum(answer.size for answer in self.answers)
        return text + usage.completion_tokens + _LOGPROB_BYTES * (generated + prompt)

    def timings(self) -> TimingsBody:
        """Where the time of a finished request went, up to the first call; for several prompts, that of the last one to
        end.
        """
        if self._timings is None:
            self._timings = self._measure()
        return self._timings

    def _measure(self) -> TimingsBody:
        now = time.monotonic()
        times = self._latest()
        marks = [self._exchange.arrival]
        for mark in (times.arrival, times.scheduled, times.first_token, times.finished, now):
            marks.append(max(mark, marks[-1]))  # a mark that was not reached takes no time
        parts = [after - before for before, after in itertools.pairwise(marks)]
        tokenize, queue, prefill, decode, deliver = parts
        made = TimingsBody(tokenize, queue, prefill, decode, deliver, sum(parts))
        made.parts = self._parts(times, now)
        if drafted := sum(output.usage.draft_tokens for output in self.outputs):
            made.draft_n = drafted
            made.draft_n_accepted = sum(output.usage.accepted_draft_tokens for output in self.outputs)
        return made

    def _parts(self, times: Timings, now: float) -> dict[str, float]:
        """The same by the names of an explanation, from the first byte read."""
        exchange = self._exchange
        marks = {
            "receive": exchange.received, "parse": exchange.parsed, "tokenize": times.arrival,
            "grammar": exchange.compiled, "memory": exchange.admitted, "queue": times.scheduled,
            "prefill": times.first_token, "decode": times.finished, "write": now,
        }  # fmt: skip
        last, parts = exchange.begun, {}
        for name, mark in marks.items():
            parts[name], last = max(0.0, mark - last), max(mark, last)
        return parts

    def _latest(self) -> Timings:
        return max((output.timings for output in self.outputs), key=lambda t: t.finished)


class Answer:
    """The content of one choice of an answer that is not streamed: texts in UTF-8, and logprobs."""

    __slots__ = ("calls", "logprobs", "reasoning", "text")

    def __init__(self) -> None:
        self.text = bytearray()
        self.reasoning = bytearray()
        self.calls: list[CallAnswer] = []
        self.logprobs: LogprobTable | None = None

    @property
    def size(self) -> int:
        """Bytes of all texts."""
        return len(self.text) + len(self.reasoning) + sum(len(call.arguments) for call in self.calls)

    def add(self, delta: StreamDelta) -> int:
        """Add a delta; returns the bytes of its texts."""
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or LogprobTable()
            self.logprobs.extend(delta.logprobs)
        if delta.parts is not None:
            return sum(map(self._add_part, delta.parts))
        text = delta.text.encode()
        self.text += text
        return len(text)

    def _add_part(self, part: AnswerPart) -> int:
        text = part.text.encode()
        if part.kind is PartKind.TEXT:
            self.text += text
        elif part.kind is PartKind.REASONING:
            self.reasoning += text
        elif part.kind is PartKind.CALL:
            self.calls.append(CallAnswer(part.call_id, part.text, bytearray()))
        else:
            self.calls[-1].arguments += text
        return len(text)


@dataclass(slots=True)
class CallAnswer:
    """A call in an answer that is not streamed; its arguments in UTF-8."""

    id: str
    name: str
    arguments: bytearray


class ChoiceStream:
    """One choice of a stream, and all that turns its tokens into events: kept together, as caches are cold."""

    __slots__ = (
        "choice", "chunk_of", "closing", "events_of", "last", "observe", "opening", "parted", "text_of",
        "token_of", "whole", "writer", "written",
    )  # fmt: skip

    def __init__(self, observe: Callable[[float], None]) -> None:
        self.observe = observe  # called with the seconds between two tokens
        self.last = 0.0  # when the latest token arrived
        self.opening = self.closing = b""
        self.writer: ChunkWriter | None = None
        self.written = 0
        self.choice = 0
        self.events_of: EventsOf | None = None  # for an answer that is read in parts
        self.parted = False  # text is an event of `events_of`
        self.chunk_of: ChunkOf | None = None
        self.token_of: TokenOf | None = None
        self.text_of: TextOf | None = None
        self.whole = False  # everything is an event of `chunk_of`

    def take(self, text: str, now: float) -> bool:
        """Write text as an event; false, without writing, when the text has to wait for the client."""
        if self.parted:
            if text and self._take_text(text, now):
                return True
            return self.take_parts([AnswerPart(PartKind.TEXT, text)] if text else (), now)
        if text:
            size = (
                0
                if self.writer is None
                else self.writer.write_chunk(self.opening, _encode(text), self.closing)
            )
            if not size:
                return False
            self.written += size
        self.observe(now - self.last)
        self.last = now
        return True

    def take_parts(self, parts: Sequence[AnswerPart], now: float) -> bool:
        """Write parts as events; false, without writing, when they have to wait for the client."""
        if len(parts) == 1 and parts[0].kind is PartKind.TEXT and self._take_text(parts[0].text, now):
            return True
        if parts:
            if self.writer is None or self.events_of is None or self.writer.paused:
                return False  # before the events are made: they are numbered
            events = self.events_of(self.choice, parts)
            if events is None:
                return False
            if events:
                self.written += self.writer.write_chunk(b"", events, b"")
        self.observe(now - self.last)
        self.last = now
        return True

    def _take_text(self, text: str, now: float) -> bool:
        """Write a text that continues the text of the answer; false, without writing, if it does not."""
        if self.text_of is None or self.writer is None or self.writer.paused:
            return False
        event = self.text_of(text)
        if event is None:
            return False
        self.written += self.writer.write_chunk(*event)
        self.observe(now - self.last)
        self.last = now
        return True

    def take_delta(self, delta: StreamDelta, now: float) -> bool:
        """Write a delta as events; false, without writing, when it has to wait for the client."""
        if self.writer is None or self.chunk_of is None or self.writer.paused or not is_portion(delta):
            return False
        if events := self.chunk_of(self.choice, delta):
            self.written += self.writer.write_chunk(b"", events, b"")
        self.observe(now - self.last)
        self.last = now
        return True

    def take_token(self, text: str, token_id: int, logprob: float | None, now: float) -> bool:
        """Write a token as an event; false, without writing, when `take_delta` has to."""
        if self.token_of is None or self.writer is None or self.writer.paused:
            return False
        event = self.token_of(self.choice, text, token_id, logprob)
        if event is None:
            return False
        self.written += self.writer.write_chunk(*event)
        self.observe(now - self.last)
        self.last = now
        return True


def finish_reason(reason: FinishReason | None) -> str:
    """A finish reason as OpenAI names it; "abort" for a request that was cut short."""
    return _REASONS.get(reason or FinishReason.ABORT, "abort")


class _Merged:
    """Several streams read as one."""

    def __init__(
        self, streams: Sequence[Stream], samples: int, took: Callable[[int, StreamDelta], None]
    ) -> None:
        self._deltas: list[tuple[int, StreamDelta]] = []
        self._wake = asyncio.Event()
        self._took = took
        self._error: BaseException | None = None
        self._tasks = [
            asyncio.create_task(self._pump(stream, i * samples)) for i, stream in enumerate(streams)
        ]
        self._open = len(self._tasks)
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def _pump(self, stream: Stream, first: int) -> None:
        async for delta in stream:
            self._took(first + delta.index, delta)
            self._deltas.append((first + delta.index, delta))
            self._wake.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open -= 1
        if not task.cancelled():
            self._error = self._error or task.exception()  # raised where the streams are read
        self._wake.set()

    async def take(self) -> Deltas:
        """All unread deltas; waits for at least one, and is empty at the end. Raises the first failure of a stream."""
        while True:
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                return deltas
            if self._error is not None:
                raise self._error
            if not self._open:
                return ()
            self._wake.clear()
            await self._wake.wait()

    async def close(self) -> None:
        """Stop reading."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
