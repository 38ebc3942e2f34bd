"""From events to a RequestOutput: text, usage, timings, and how each sample ended."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from typing import TYPE_CHECKING

from quire.answers import AnswerPart, PartKind, RowDrafts, Timings, Usage
from quire.engine.api import StreamDelta
from quire.logprobs import LogprobTable
from quire.outputs import CompletionOutput, RequestOutput
from quire.records import dataclass
from quire.text.detokenizer import ByteLevelDetokenizer
from quire.text.parts import PartedText, add_call_part
from quire.text.sample_text import SampleText, StoppedText
from quire.text.stop import StopStrings
from quire.text.tokenizer import Tokenizer
from quire.types import (
    FinishReason,
    Request,
    RequestError,
    SeqEvent,
)

if TYPE_CHECKING:
    from quire.text.reading import Reading  # imported by the requests that have one

PRIME_TOKENS = 16


@dataclass(slots=True)
class Sample:
    """One sample while it is generated. Without a tokenizer it has token ids and no text."""

    output: CompletionOutput
    text: SampleText | None


class OutputBuilder:
    """One request, and the RequestOutput that grows with it.

    `stop` is called with the index of a sample in whose text a stop string was found. Without `keep`, text and
    logprobs of the samples are in the deltas alone; see GenerateAsk.keep_output. `reading` divides answers into
    parts. `accepted`: see GenerateAsk. Raises RequestError for stop strings without a tokenizer.
    """

    __slots__ = ("_accepted", "_keep", "_params", "_prompt_logprobs", "_stop", "output", "samples")

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, stop: Callable[[int], object],
        *, keep: bool = True, reading: Reading | None = None,
        accepted: Sequence[MutableSequence[int]] | None = None,
    ) -> None:  # fmt: skip
        params = self._params = request.params
        if params.stop and tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer, and this model folder has none")
        stops = StopStrings(params.stop) if params.stop else None
        self._keep, self._stop, self._accepted = keep, stop, accepted
        self._prompt_logprobs = LogprobTable()
        self.output = RequestOutput(
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
        seed = "" if reading is None else os.urandom(16).hex()
        self.samples = [
            Sample(completion, _text(request, tokenizer, stops, reading, f"{seed}-{completion.index}"))
            for completion in self.output.outputs
        ]
        if keep and params.logprobs is not None:
            for completion in self.output.outputs:
                completion.logprobs = LogprobTable()

    def started(self, at: float) -> None:
        """Record when the request was first scheduled; later calls, after preemption, change nothing."""
        if not self.output.timings.scheduled:
            self.output.timings.scheduled = at

    def given(self, request: Request) -> list[StreamDelta]:
        """Add the output that another engine has made; the change of each sample that has some. No token has come by
        that. O(tokens), for another thread than the loop's. Raises RequestError for one that ends by its text."""
        deltas = []
        for index, ids in enumerate(request.given):
            sample = self.samples[index]
            text, kept = self._extend(sample, list(ids), 0.0)
            if sample.text is not None and sample.text.matched is not None:
                raise RequestError("given", "the output has ended")
            if kept:
                deltas.append(StreamDelta(index, text, kept, parts=self._parts(sample)))
        return deltas

    def apply(self, event: SeqEvent, now: float) -> StreamDelta | None:
        """Apply one event; returns the change, None for a sample that has ended. The delta takes over the event's
        lists.
        """
        sample = self.samples[event.sample_index]
        output = sample.output
        if output.finish_reason is not None:
            return None
        self.output.usage.cached_tokens = event.cached_tokens
        if event.drafts is not None:
            self.drafted(event.sample_index, event.drafts)
        if event.prompt_logprobs:
            self._prompt_logprobs.extend(event.prompt_logprobs)
        hidden = event.stop_token_id is not None and not self._params.include_stop_str_in_output
        # the stop token is in token_ids, but not in the text
        text, kept = self._extend(
            sample, event.new_token_ids, now, hidden=int(hidden), last=event.finish_reason is not None
        )
        logprobs = event.logprobs
        if logprobs and len(kept) < len(event.new_token_ids):
            logprobs = logprobs[: len(kept)]
        if output.logprobs is not None and logprobs:
            output.logprobs.extend(logprobs)
        if event.pooled:
            self.output.pooled = event.pooled
        reason = event.finish_reason
        output.stop_reason = event.stop_token_id
        if sample.text is not None and sample.text.matched is not None:
            reason, output.stop_reason = self._matched(sample, sample.text.matched, running=reason is None)
        if reason is not None:
            self._finish(sample, reason, now)
        return StreamDelta(
            event.sample_index, text, kept, logprobs, reason, output.stop_reason, self._parts(sample)
        )

    def drafted(self, index: int, drafts: RowDrafts) -> None:
        """Record what became of the drafts of a row, before its tokens: those accepted come first among them."""
        self.output.usage.count(drafts)
        if self._accepted is not None and drafts.accepted:
            first = len(self.samples[index].output.token_ids)
            self._accepted[index].extend(range(first, first + drafts.accepted))

    def grow(self, index: int, token_ids: list[int], now: float) -> StreamDelta | None:
        """Like `apply`, for an event with nothing but tokens: the most frequent case by far."""
        sample = self.samples[index]
        if sample.output.finish_reason is not None:
            return None
        text, kept = self._extend(sample, token_ids, now)
        parts = self._parts(sample)
        if sample.text is None or sample.text.matched is None:
            return StreamDelta(index, text, kept, parts=parts)
        reason, sample.output.stop_reason = self._matched(sample, sample.text.matched, running=True)
        self._finish(sample, reason, now)
        return StreamDelta(index, text, kept, None, reason, sample.output.stop_reason, parts)

    def abort(self, now: float) -> None:
        """End every sample that is still running."""
        for sample in self.samples:
            if sample.output.finish_reason is None:
                self._finish(sample, FinishReason.ABORT, now)

    def _extend(
        self, sample: Sample, token_ids: list[int], now: float, *, hidden: int = 0, last: bool = False
    ) -> tuple[str, list[int]]:
        """Add tokens and their text to a sample, without that of the last `hidden`; returns the new text, and the
        tokens up to where the text ends the sample.
        """
        output, text = sample.output, ""
        if sample.text is not None:
            text, token_ids = self._push(sample.text, token_ids, hidden)
            if last:
                text += sample.text.finish()
            if self._keep:
                # with one reference a string grows in place; with two it would be copied for every token
                whole, output.text = output.text, ""
                whole += text
                output.text = whole
        if token_ids:
            timings = self.output.timings
            if not timings.first_token:
                timings.first_token = now
            output.token_ids.extend(token_ids)
            self.output.usage.completion_tokens += len(token_ids)
        return text, token_ids

    def _push(self, text: SampleText, token_ids: list[int], hidden: int) -> tuple[str, list[int]]:
        if isinstance(text, PartedText):
            tokens, reasoning = text.tokens, text.reasoning_tokens
            made = text.push(token_ids, hidden)
            self.output.usage.reasoning_tokens += text.reasoning_tokens - reasoning
            return made, token_ids[: text.tokens - tokens]
        shown = token_ids[:-hidden] if hidden else token_ids
        if len(shown) > 1 and self._params.stop:
            return _up_to_stop(text, token_ids, shown)
        return text.push(shown), token_ids

    def _parts(self, sample: Sample) -> list[AnswerPart] | None:
        """The new parts of a sample; None where its text is not divided."""
        if not isinstance(sample.text, PartedText):
            return None
        parts = sample.text.take()
        if self._keep:
            for part in parts:
                if part.kind is PartKind.REASONING:
                    sample.output.reasoning += part.text
                elif part.kind is not PartKind.TEXT:
                    add_call_part(sample.output.tool_calls, part)
        return parts

    def _matched(self, sample: Sample, stop: str, *, running: bool) -> tuple[FinishReason, str | None]:
        """How a sample ends for its text: at a stop string, or at a second call where there may be one."""
        if running:
            self._stop(sample.output.index)
        return FinishReason.STOP, stop or None

    def _finish(self, sample: Sample, reason: FinishReason, now: float) -> None:
        """End a sample, and the request if it was the last one."""
        sample.output.finish_reason = reason
        if any(sample.output.finish_reason is None for sample in self.samples):
            return
        output = self.output
        output.finished = True
        output.timings.finished = now
        if self._params.prompt_logprobs is not None:
            prompt, table = output.usage.prompt_tokens, self._prompt_logprobs
            unscored = prompt - self._params.scored_tokens(prompt)
            output.prompt_logprobs = [*[None] * unscored, *table] if self._keep else table


def _up_to_stop(text: SampleText, token_ids: list[int], shown: list[int]) -> tuple[str, list[int]]:
    """Add the text of tokens one by one, as if each had come alone; the text, and the tokens up to a stop string."""
    made = ""
    for count, token in enumerate(shown, 1):
        made += text.push([token])
        if text.matched is not None:
            return made, token_ids[:count]
    return made, token_ids


def _text(
    request: Request,
    tokenizer: Tokenizer | None,
    stops: StopStrings | None,
    reading: Reading | None,
    seed: str,
) -> SampleText | None:
    """How the tokens of a request become text."""
    if tokenizer is None or request.pooling:
        return None
    params = request.params
    detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
    if not isinstance(detokenizer, ByteLevelDetokenizer):
        # SentencePiece-style text drops a space at its very start; the output does not start there
        detokenizer.prime(list(request.prompt_token_ids[-PRIME_TOKENS:]))
    matcher = None if stops is None else stops.matcher(include=params.include_stop_str_in_output)
    if reading is not None:
        reader = reading.reader(seed, hide=params.skip_special_tokens)
        return PartedText(
            detokenizer, reader, matcher, min_tokens=params.min_tokens, parallel=reading.parallel
        )
    if matcher is None:
        return detokenizer
    return StoppedText(detokenizer, matcher, params.min_tokens)
