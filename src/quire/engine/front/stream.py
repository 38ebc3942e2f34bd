"""A live request: what belongs to it while it runs, and the stream of deltas that its caller reads."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from quire.answers import AnswerPart, PromptProgress
from quire.engine.api import DeadlineError, GenerateAsk, StreamDelta, TextSink
from quire.engine.front.output import OutputBuilder, Sample
from quire.engine.host.messages import SAMPLE_BITS, Note, Score, scored, unpack_logprobs
from quire.text.parts import PartedText, append
from quire.text.sample_text import StoppedText
from quire.types import QuireError, Request, SeqEvent

logger = logging.getLogger("quire.engine")


class LiveRequest:
    """One request from admission to its end, and the engine's side of its stream: its text, unread deltas, sinks and
    timers. A sample has at most one unread delta: later ones are added to it.

    So the cost of a slow reader is bounded by its own output, and no step waits for a reader.
    """

    __slots__ = (
        "cached_tokens",
        "digest",
        "directs",
        "error",
        "following",
        "handle",
        "idle",
        "output",
        "pending",
        "place",
        "progress",
        "prompt_done",
        "request",
        "request_id",
        "timers",
        "unread",
        "unread_since",
        "waiter",
    )

    def __init__(
        self,
        handle: int,
        request: Request,
        following: OutputBuilder,
        digest: bytes | None = None,
        *,
        progress: bool = False,
    ) -> None:
        self.handle = handle
        self.request = request
        self.place: tuple[float, ...] = ()  # in the queue
        self.prompt_done = 0  # tokens of its prompt that are computed
        self.digest = digest  # of the request, if it arrived while there were suspects
        self.following = following
        self.progress = progress  # whether the reader wants to know how far its prompt is
        output = following.output
        self.request_id = output.request_id
        self.output = output
        self.pending: dict[int, StreamDelta] = {}
        self.unread = 0  # tokens
        self.unread_since = 0.0
        self.waiter: asyncio.Future[None] | None = None
        self.idle = False  # a reader waits and has not been woken
        self.error: QuireError | None = None
        self.cached_tokens = 0
        self.directs: list[SinkPath | None] = [None] * len(output.outputs)  # by sample; None without a sink
        self.timers: list[asyncio.TimerHandle] = []

    def set_timers(
        self,
        ask: GenerateAsk,
        now: float,
        loop: asyncio.AbstractEventLoop,
        end: Callable[[LiveRequest, QuireError], None],
    ) -> None:
        """Have `end` called when a deadline of the request passes."""

        def leave_queue(waited: float) -> None:
            if not self.output.timings.scheduled:
                end(self, DeadlineError(f"the request was not started within {waited:.3f} s"))

        if ask.deadline is not None:
            left = ask.deadline - now
            error = DeadlineError(f"the request was not finished within {left:.3f} s")
            self.timers.append(loop.call_later(left, end, self, error))
        if ask.queue_deadline is not None:
            left = ask.queue_deadline - now
            self.timers.append(loop.call_later(left, leave_queue, left))

    def left_unread(self, now: float, seconds: float, tokens: int) -> QuireError | None:
        """The error that ends a request which has been unread for so long, or with so many tokens a sample."""
        waited = now - self.unread_since
        if not self.pending or (waited <= seconds and self.unread <= tokens * len(self.output.outputs)):
            return None
        return QuireError(f"{self.unread} tokens were left unread for {waited:.1f} s: the request has ended")

    def scored(self, index: int, token: int, score: Score) -> SeqEvent:
        """A row of one token with its log-probability as the event that the engine saw."""
        table = scored(token, score)
        return SeqEvent(self.request_id, index, [token], table, None, None, cached_tokens=self.cached_tokens)

    def event(self, index: int, tokens: list[int], note: Note) -> SeqEvent:
        """A row of a step as the event that the engine saw."""
        if note.cached_tokens is not None:
            self.cached_tokens = note.cached_tokens
        return SeqEvent(
            self.request_id,
            index,
            tokens,
            unpack_logprobs(note.logprobs),
            unpack_logprobs(note.prompt_logprobs),
            note.finish_reason,
            note.stop_token_id,
            self.cached_tokens,
            pooled=note.pooled,
        )

    def rows(self) -> dict[int, SinkPath]:
        """The samples that have a sink, by the names of their rows."""
        return {
            self.handle << SAMPLE_BITS | index: direct
            for index, direct in enumerate(self.directs)
            if direct is not None
        }

    def drop_sinks(self) -> None:
        """Sinks take no more: they and the request know each other."""
        for index, direct in enumerate(self.directs):
            if direct is not None:
                direct.settle()
                self.directs[index] = None

    def computed(self, tokens: int, cached: int, now: float) -> None:
        """So many tokens of its prompt are computed: keep it, and tell a reader who wants to know."""
        self.prompt_done = tokens
        if self.progress:
            self.keep(StreamDelta(0, "", [], progress=self._progress(tokens, cached, now)), now)

    def _progress(self, tokens: int, cached: int, now: float) -> PromptProgress:
        usage, timings = self.output.usage, self.output.timings
        return PromptProgress(usage.prompt_tokens, cached, tokens, now - timings.scheduled)

    def push(self, delta: StreamDelta, now: float) -> None:
        """Add the result of a step."""
        if self.progress:  # these are the first tokens
            self.progress = False
            usage = self.output.usage
            delta.progress = self._progress(usage.prompt_tokens, usage.cached_tokens, now)
        direct = self.directs[delta.index]
        if direct is None or not direct.offer(delta, now):
            self.keep(delta, now)

    def keep(self, delta: StreamDelta, now: float) -> None:
        """Keep a delta for the reader."""
        if not self.pending:
            self.unread_since = now
        self.unread += len(delta.token_ids)
        waiting = self.pending.get(delta.index)
        if waiting is None:
            self.pending[delta.index] = delta
        else:
            _merge(waiting, delta)
        self.wake()

    def end(self, error: QuireError | None = None) -> None:
        """Nothing more will arrive. Unread deltas can still be read, then the error is raised."""
        self.error = error
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
        self.wake()

    def wait(self) -> None:
        """The reader waits: sinks may be offered text."""
        self.idle = True
        for direct in self.directs:
            if direct is not None:
                direct.opened()

    def busy(self) -> None:
        """The reader no longer waits."""
        self.idle = False
        for direct in self.directs:
            if direct is not None:
                direct.settle()

    def wake(self) -> None:
        """Make the reader check again."""
        if self.idle and self.waiter is not None:
            self.busy()
            if not self.waiter.done():  # it may have been cancelled just now
                self.waiter.set_result(None)


class SinkPath:
    """The path from the tokens of a sample to its sink while the reader is idle.

    Nearly all tokens take this path, and each finds the caches emptied by the engine's step: the cost depends on the
    number of objects that a token touches. So it touches as few objects as possible, and creates no bound methods.
    """

    __slots__ = ("_ids", "_live", "_sample", "_settled", "_sink", "_text", "open", "whole")

    def __init__(self, live: LiveRequest, sample: Sample, sink: TextSink) -> None:
        self._live, self._sample, self._sink = live, sample, sink
        self._ids = sample.output.token_ids
        self._text = sample.text
        self._settled = 0  # length of _ids that usage already includes
        self.open = False  # whether tokens are accepted
        self.whole = sink.whole  # whether they may have log-probabilities

    def opened(self) -> None:
        """The reader waits. A sample whose text may end it takes the other path."""
        sample = self._sample
        ends = isinstance(sample.text, StoppedText) or sample.output.finish_reason is not None
        self.open = bool(self._ids and self._live.output.timings.first_token) and not ends
        self._settled = len(self._ids)

    def takes(self, note: Note) -> bool:
        """Whether tokens with this note are accepted, while `open`: it has log-probabilities alone."""
        return self.whole and note.only_logprobs

    def take(
        self, token_ids: list[int], now: float, note: Note | None = None, score: Score | None = None
    ) -> None:
        """Accept tokens that add only text, and what a note or a score says that is accepted, while `open`."""
        self._ids.extend(token_ids)
        text = "" if self._text is None else self._text.push(token_ids)
        if self.whole and note is None and len(token_ids) == 1:
            try:
                if self._sink.take_token(text, token_ids[0], None if score is None else score[1], now):
                    return
            except Exception:
                self._fail()
        self._pass_on(text, None, token_ids, now, note, score)

    def _pass_on(
        self,
        text: str,
        parts: list[AnswerPart] | None,
        token_ids: list[int],
        now: float,
        note: Note | None,
        score: Score | None,
    ) -> None:
        """Give the sink what a step added, or else the reader."""
        delta = None
        if self.whole:
            logprobs = None if note is None else unpack_logprobs(note.logprobs)
            if score is not None:
                logprobs = scored(token_ids[0], score)
            delta = StreamDelta(self._sample.output.index, text, token_ids, logprobs, parts=parts)
        if not self._give(text, parts, delta, now):
            self.settle()
            left = delta or StreamDelta(self._sample.output.index, text, token_ids, parts=parts)
            self._live.keep(left, now)

    def offer(self, delta: StreamDelta, now: float) -> bool:
        """Offer the sink a delta that `output` already includes; false when it must be read."""
        if not self._live.idle or delta.finish_reason is not None:
            return False
        if len(self._ids) <= len(delta.token_ids) or (delta.logprobs is not None and not self.whole):
            return False
        return self._give(delta.text, delta.parts, delta if self.whole else None, now)

    def _give(
        self, text: str, parts: Sequence[AnswerPart] | None, delta: StreamDelta | None, now: float
    ) -> bool:
        """Give the sink a delta, a text, or the parts of an answer; false when the reader must deliver it.

        If the sink fails, the reader will see the failure again; the step goes on for all others.
        """
        try:
            if delta is not None:
                return self._sink.take_delta(delta, now)
            return self._sink.take(text, now) if parts is None else self._sink.take_parts(parts, now)
        except Exception:
            self._fail()
            return False

    def _fail(self) -> None:
        logger.exception("writing a delta of %s failed", self._live.request_id)
        self._sink = _Nowhere()

    def settle(self) -> None:
        """Add the accepted tokens to usage; later tokens take another path."""
        if self.open:
            self.open = False
            self._live.output.usage.completion_tokens += len(self._ids) - self._settled


class PartedPath(SinkPath):
    """The same for a sample that is read in parts."""

    __slots__ = ("_reasoned",)
    _text: PartedText

    def opened(self) -> None:
        """See SinkPath."""
        self.open = bool(self._ids) and not self._text.may_end and self._sample.output.finish_reason is None
        self._settled, self._reasoned = len(self._ids), self._text.reasoning_tokens

    def take(
        self, token_ids: list[int], now: float, note: Note | None = None, score: Score | None = None
    ) -> None:
        """See SinkPath."""
        self._ids.extend(token_ids)
        text = self._text.push(token_ids)
        self._pass_on(text, self._text.take(), token_ids, now, note, score)

    def settle(self) -> None:
        """See SinkPath."""
        if self.open:
            self._live.output.usage.reasoning_tokens += self._text.reasoning_tokens - self._reasoned
        super().settle()


def _path(live: LiveRequest, sample: Sample, sink: TextSink) -> SinkPath:
    kind = PartedPath if isinstance(sample.text, PartedText) else SinkPath
    return kind(live, sample, sink)


class _Nowhere:
    """A sink that accepts nothing."""

    whole = False

    def take(self, _text: str, _now: float) -> bool:
        return False

    def take_parts(self, _parts: Sequence[AnswerPart], _now: float) -> bool:
        return False

    def take_delta(self, _delta: StreamDelta, _now: float) -> bool:
        return False

    def take_token(self, _text: str, _token_id: int, _logprob: float | None, _now: float) -> bool:
        return False


class LiveStream:
    """api.Stream. It has one reader, and cancels itself when it is dropped before its end."""

    __slots__ = ("__weakref__", "_cancel", "_deliver", "_live", "_loop", "output", "request_id")

    def __init__(
        self,
        live: LiveRequest,
        loop: asyncio.AbstractEventLoop,
        cancel: Callable[[LiveRequest], None],
        deliver: Callable[[dict[int, SinkPath]], None],
    ) -> None:
        self._live, self._loop, self._cancel, self._deliver = live, loop, cancel, deliver
        self.request_id = live.request_id
        self.output = live.output

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        live = self._live
        while not live.pending:
            if live.error is not None:
                raise live.error
            if live.output.finished:
                raise StopAsyncIteration
            if live.waiter is not None:
                raise RuntimeError("a stream can have only one reader")
            live.waiter = self._loop.create_future()
            live.wait()
            try:
                await live.waiter
            finally:
                live.waiter = None
                live.busy()
        delta = live.pending.pop(next(iter(live.pending)))
        live.unread -= len(delta.token_ids)
        if live.pending:
            live.unread_since = time.monotonic()
        return delta

    def deliver_to(self, sinks: Sequence[TextSink]) -> None:
        """Offer text to the sinks, one per sample, as it arrives, before it becomes unread."""
        if not self.output.finished:
            live = self._live
            live.directs[:] = map(functools.partial(_path, live), live.following.samples, sinks)
            self._deliver(live.rows())

    def nudge(self) -> None:
        """Give a reader that waits a delta with nothing in it."""
        if self._live.idle:
            self._live.keep(StreamDelta(0, "", []), time.monotonic())

    def cancel(self) -> None:
        """Stop computing within one step and forget the request. Does nothing when it has ended."""
        self._cancel(self._live)

    def __del__(self) -> None:
        if not self._live.output.finished and not self._loop.is_closed():
            # the garbage collector may run on any thread
            self._loop.call_soon_threadsafe(self._cancel, self._live)


def _merge(into: StreamDelta, delta: StreamDelta) -> None:
    into.text += delta.text
    into.token_ids += delta.token_ids
    if into.logprobs is None:
        into.logprobs = delta.logprobs
    elif delta.logprobs is not None:
        into.logprobs.extend(delta.logprobs)
    into.progress = delta.progress or into.progress
    if delta.parts:
        into.parts = into.parts or []
        for part in delta.parts:
            append(into.parts, part)
    into.finish_reason = delta.finish_reason
    into.stop_reason = delta.stop_reason
