"""Events of sequences -> text and RequestOutput: detokenization, stop strings, usage, timings."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.engine.api import StreamDelta
from quire.text.detokenizer import ByteLevelDetokenizer, Detokenizer
from quire.text.stop import StopMatcher, StopStrings
from quire.text.tokenizer import Tokenizer
from quire.types import (
    CompletionOutput,
    FinishReason,
    LogprobTable,
    Request,
    RequestOutput,
    SeqEvent,
    Timings,
    Usage,
)

PRIME_TOKENS = 16

Stop = Callable[[str, int], SeqEvent | None]


@dataclass(slots=True)
class Sample:
    """Text of one sample as it grows."""

    output: CompletionOutput
    detokenizer: Detokenizer | None
    matcher: StopMatcher | None


@dataclass(slots=True)
class Following:
    """A request on its way, and the RequestOutput that grows with it."""

    request: Request
    output: RequestOutput
    samples: list[Sample]
    keep: bool = True  # text and logprobs of the samples, and the prompt
    prompt_logprobs: LogprobTable = field(default_factory=LogprobTable)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step added to one sample: new text (may be empty) and new token ids."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


class OutputProcessor:
    """Turns SeqEvents into RequestOutputs. Without a tokenizer, outputs hold token ids and no text."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Stop, clock: Callable[[], float]) -> None:
        self._tokenizer, self._stop, self._clock = tokenizer, stop, clock
        self._states: dict[str, Following] = {}

    def add(
        self, request: Request, prompt: str | None, stops: StopStrings | None, *, keep: bool = True
    ) -> Following:
        """Start following a request; `keep` as GenerateAsk.keep_output."""
        params = request.params
        output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_token_ids) if keep else [],
            outputs=[
                CompletionOutput(index=i, text="", token_ids=[] if keep else array("i"))
                for i in range(params.n)
            ],
            usage=Usage(prompt_tokens=len(request.prompt_token_ids)),
            timings=Timings(arrival=request.arrival),
        )
        samples = []
        for completion in output.outputs:
            if keep and params.logprobs is not None:
                completion.logprobs = LogprobTable()
            detokenizer = self._tokenizer.detokenizer(params.skip_special_tokens) if self._tokenizer else None
            if detokenizer is not None and not isinstance(detokenizer, ByteLevelDetokenizer):
                # SentencePiece-style text drops a space at its very start, and the output is not the start
                detokenizer.prime(list(request.prompt_token_ids[-PRIME_TOKENS:]))
            matcher = stops.matcher(include=params.include_stop_str_in_output) if stops else None
            samples.append(Sample(completion, detokenizer, matcher))
        state = self._states[request.request_id] = Following(request, output, samples, keep)
        return state

    def started(self, request_ids: list[str], at: float) -> None:
        """Note when requests were first scheduled; later times, after preemption, change nothing."""
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state and not state.output.timings.scheduled:
                state.output.timings.scheduled = at

    def take(self, events: list[SeqEvent]) -> list[TextDelta]:
        """Apply one step's events; what changed, sample by sample. Finished requests are forgotten."""
        now = self._clock()
        deltas = []
        for event in events:
            delta = self.apply(event, now)
            if delta is not None:
                deltas.append(
                    TextDelta(event.request_id, delta.index, delta.text, delta.token_ids, delta.finish_reason)
                )
        return deltas

    def apply(self, event: SeqEvent, now: float) -> StreamDelta | None:
        """Apply one event; what changed, None for a sample that has ended. The delta takes the event's lists."""
        state = self._states.get(event.request_id)
        if state is None:
            return None
        sample = state.samples[event.sample_index]
        output = sample.output
        if output.finish_reason is not None:
            return None
        state.output.usage.cached_tokens = event.cached_tokens
        if event.prompt_logprobs:
            state.prompt_logprobs.extend(event.prompt_logprobs)
        if output.logprobs is not None and event.logprobs:
            output.logprobs.extend(event.logprobs)
        hidden = event.stop_token_id is not None and not state.request.params.include_stop_str_in_output
        # the stop token is in token_ids, and not in the text
        shown = event.new_token_ids[:-1] if hidden else event.new_token_ids
        text, matched = self._extend(
            state, sample, event.new_token_ids, shown, now, last=event.finish_reason is not None
        )
        reason, stop_reason = event.finish_reason, event.stop_token_id
        if matched is not None:
            reason, stop_reason = FinishReason.STOP, None
        if reason is not None:
            output.stop_reason = matched if matched is not None else stop_reason
            self._finish(state, sample, reason, now)
        return StreamDelta(
            event.sample_index, text, event.new_token_ids, event.logprobs, reason, output.stop_reason
        )

    def grow(self, state: Following, index: int, token_ids: list[int], now: float) -> StreamDelta | None:
        """As `apply`, of an event that brings tokens and nothing else: what nearly all are."""
        sample = state.samples[index]
        if sample.output.finish_reason is not None:
            return None
        text, matched = self._extend(state, sample, token_ids, token_ids, now)
        if matched is None:
            return StreamDelta(index, text, token_ids)
        sample.output.stop_reason = matched
        self._finish(state, sample, FinishReason.STOP, now)
        return StreamDelta(index, text, token_ids, None, FinishReason.STOP, matched)

    def end(self, request_id: str, now: float) -> None:
        """Mark every sample of a request that has not ended as aborted, and forget it; harmless when unknown."""
        state = self._states.get(request_id)
        if state is None:
            return
        for sample in state.samples:
            if sample.output.finish_reason is None:
                sample.output.finish_reason = FinishReason.ABORT
        self._close(state, now)

    def _extend(
        self,
        state: Following,
        sample: Sample,
        token_ids: list[int],
        shown: list[int],
        now: float,
        *,
        last: bool = False,
    ) -> tuple[str, str | None]:
        """Add tokens and the text of `shown` to a sample: the new text, and the stop string that ends it, if any."""
        output = sample.output
        if token_ids:
            if not output.token_ids:
                timings = state.output.timings
                timings.first_token = timings.first_token or now
            output.token_ids.extend(token_ids)
            state.output.usage.completion_tokens += len(token_ids)
        if sample.detokenizer is None:
            return "", None
        text, matched = sample.detokenizer.push(shown), None
        if last:
            text += sample.detokenizer.finish()
        # below min_tokens text passes by the matcher: a stop string may not end the sample yet
        if sample.matcher is not None and len(output.token_ids) > state.request.params.min_tokens:
            text, matched = sample.matcher.push(text)
            if matched is None and last:
                text += sample.matcher.finish()
        if state.keep:
            # held once, a string grows in place; held twice, it would be copied for every token
            whole, output.text = output.text, ""
            whole += text
            output.text = whole
        if matched is not None:
            self._stop(state.request.request_id, output.index)
        return text, matched

    def _finish(self, state: Following, sample: Sample, reason: FinishReason, now: float) -> None:
        """End a sample."""
        sample.output.finish_reason = reason
        self._close(state, now)

    def _close(self, state: Following, now: float) -> None:
        """Finish the request when its last sample has ended."""
        if any(sample.output.finish_reason is None for sample in state.samples):
            return
        output = state.output
        output.finished = True
        output.timings.finished = now
        if state.request.params.prompt_logprobs is not None:
            # the first prompt token has no logprob: nothing comes before it
            table = state.prompt_logprobs
            output.prompt_logprobs = [None, *table] if state.keep else table
        del self._states[output.request_id]
