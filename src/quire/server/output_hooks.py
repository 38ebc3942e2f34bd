"""An operator's hook on every answer: loaded at the start, called off the event loop with a budget of time.

It stands between the engine's streams and all that reads them, so that every API has it, whole and streamed.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import queue
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from typing import cast

from quire.answers import AnswerPart, PartKind
from quire.config.serving import ServingConfig
from quire.engine.api import Stream, StreamDelta, TextSink
from quire.output_hook import OutputChunk, OutputEdit, OutputHook
from quire.records import dataclass
from quire.types import FinishReason

logger = logging.getLogger("quire.server")

# Calls at a time. A call over its budget keeps its thread until it returns.
_THREADS = 4
# Characters that a hook may return beyond those that it was given.
MAX_ADDED_CHARS = 64 * 1024
_FAULT = "output_hook"  # the reason of an answer that a failing hook ends


def find_hook(name: str) -> OutputHook:
    """The function MODULE:FUNCTION of the Python path. Raises ValueError naming the option."""
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise ValueError(f"output_hook: {name!r} is not MODULE:FUNCTION")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"output_hook: {error}") from None
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ValueError(f"output_hook: {name} is not a function, or an async one")
    return cast(OutputHook, found)


class _HookError(Exception):
    """What was wrong with a call."""


def _edit_of(made: object, text: str) -> OutputEdit:
    """What a hook means by what it returned or raised for a text. Raises _HookError."""
    if isinstance(made, BaseException):
        raise _HookError(f"{type(made).__name__}: {made}")
    if made is None or isinstance(made, str):
        made = OutputEdit(text if made is None else made)
    if not isinstance(made, OutputEdit):
        raise _HookError(f"it returned a {type(made).__name__}")
    if not all(isinstance(given, str) for given in (made.text, made.held, made.end or "")):
        raise _HookError("it returned an OutputEdit of other things than texts")
    if len(made.text) + len(made.held) > len(text) + MAX_ADDED_CHARS:
        raise _HookError(f"it returned over {MAX_ADDED_CHARS} characters more than it was given")
    return made


class _HookThreads:
    """Threads that call the hook. The process does not wait for one of them at its end: a call may never return."""

    def __init__(self, function: OutputHook) -> None:
        self._function = function
        self._work: queue.SimpleQueue[tuple[Future[object], OutputChunk] | None] = queue.SimpleQueue()
        for number in range(_THREADS):
            threading.Thread(target=self._run, name=f"quire-hook-{number}", daemon=True).start()

    def submit(self, chunk: OutputChunk) -> Future[object]:
        """Have the hook called; cancelling what is returned keeps a call from beginning."""
        call: Future[object] = Future()
        self._work.put((call, chunk))
        return call

    def close(self) -> None:
        """End each thread behind its call."""
        for _ in range(_THREADS):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            call, chunk = work
            if not call.set_running_or_notify_cancel():
                continue
            try:
                call.set_result(self._function(chunk))
            except BaseException as error:
                call.set_exception(error)


class OutputHooks:
    """Calls the hook. `outcomes` counts chunks by what became of them (metrics.HOOK_OUTCOMES)."""

    def __init__(self, config: ServingConfig, outcomes: Counter[str]) -> None:
        assert config.output_hook is not None
        self._outcomes = outcomes
        self.stops = config.output_hook_failure == "stop"
        self._threads = _HookThreads(find_hook(config.output_hook))
        self._seconds = config.output_hook_ms / 1000
        self._told = False

    def wrap(self, stream: Stream) -> Stream:
        """The same stream with the hook's edits."""
        return HookedStream(stream, self)

    async def edit(self, chunk: OutputChunk) -> OutputEdit | None:
        """What becomes of a chunk; None if the hook failed or was late."""
        text = chunk.text
        call = asyncio.wrap_future(self._threads.submit(chunk))
        try:
            await asyncio.wait({call}, timeout=self._seconds)
        finally:
            call.cancel()  # unless it is done
        if call.cancelled():
            self._fail("timeout", f"a call took more than {self._seconds * 1000:g} ms")
            return None
        try:
            edit = _edit_of(call.exception() or call.result(), text)
        except _HookError as error:
            self._fail("error", str(error))
            return None
        same = not edit.held and edit.text == text
        self._outcomes["ended" if edit.end is not None else "kept" if same else "changed"] += 1
        return edit

    def _fail(self, outcome: str, what: str) -> None:
        self._outcomes[outcome] += 1
        if not self._told:
            self._told = True
            then = "such answers end" if self.stops else "the rest of such answers passes without it"
            logger.error("the output hook failed, %s (told once; see the metric): %s", then, what)

    def close(self) -> None:
        """Make no more calls."""
        self._threads.close()


@dataclass(slots=True)
class _HookedSample:
    """One answer: the part that is open, and what the hook keeps."""

    chunk: OutputChunk
    call: int = 0
    open: bool = False
    held: str = ""
    passes: bool = False  # without the hook
    ended: str | None = None  # by the hook, for this reason


class HookedStream:
    """api.Stream whose deltas the hook has edited. All text goes to the reader: no sink gets any."""

    def __init__(self, stream: Stream, hooks: OutputHooks) -> None:
        self.request_id, self.output = stream.request_id, stream.output
        self._stream, self._hooks = stream, hooks
        self._samples = [
            _HookedSample(OutputChunk(stream.request_id, number, PartKind.TEXT.value, "", last=False))
            for number in range(len(stream.output.outputs))
        ]

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        while True:
            delta = await anext(self._stream.__aiter__())
            sample = self._samples[delta.index]
            if sample.ended is not None:
                continue
            if delta.text or delta.parts or delta.finish_reason is not None:
                await self._edit(sample, delta)
            return delta

    def deliver_to(self, sinks: Sequence[TextSink]) -> None:
        """Nothing: the hook's calls are waited for where deltas are read."""

    def nudge(self) -> None:
        """See api.Stream."""
        self._stream.nudge()

    def cancel(self) -> None:
        """See api.Stream."""
        self._stream.cancel()

    async def _edit(self, sample: _HookedSample, delta: StreamDelta) -> None:
        """Have the hook edit a delta, piece by piece."""
        parts = [AnswerPart(PartKind.TEXT, delta.text)] if delta.parts is None else delta.parts
        made: list[AnswerPart] = []
        for part, last in _pieces(sample, parts, ended=delta.finish_reason is not None):
            if part.kind is PartKind.CALL:
                sample.chunk.function = part.text
                made.append(part)
                continue
            text = await self._passed(sample, part, last=last)
            if text:
                made.append(AnswerPart(part.kind, text, part.call))
            if sample.ended is not None:
                self._end(sample, delta)
                break
        delta.text = "".join(part.text for part in made if part.kind is PartKind.TEXT)
        if delta.parts is not None:
            delta.parts = made

    async def _passed(self, sample: _HookedSample, part: AnswerPart, *, last: bool) -> str:
        """The text of a piece that goes on to the client."""
        text, sample.held = sample.held + part.text, ""
        if sample.passes:
            return text
        chunk = sample.chunk
        chunk.kind, chunk.text, chunk.last = part.kind.value, text, last
        if part.kind is not PartKind.ARGUMENTS:
            chunk.function = ""
        edit = await self._hooks.edit(chunk)
        if edit is None:
            sample.chunk = OutputChunk(chunk.request_id, chunk.sample, chunk.kind, "", last=False)
            if self._hooks.stops:
                sample.ended = _FAULT
                return ""
            sample.passes = True
            return text
        sample.ended = edit.end
        if last or edit.end is not None:
            return edit.text + (edit.held if edit.end is None else "")
        sample.held = edit.held
        return edit.text

    def _end(self, sample: _HookedSample, delta: StreamDelta) -> None:
        """The hook ends a sample; with the last one, the engine's work."""
        outputs = self.output.outputs
        running = [output for output in outputs if output.finish_reason is None]
        delta.finish_reason, delta.stop_reason = FinishReason.CONTENT_FILTER, sample.ended
        if all(self._samples[output.index].ended is not None for output in running):
            self._stream.cancel()
        for output, of in zip(outputs, self._samples, strict=True):
            if of.ended is not None:
                output.finish_reason, output.stop_reason = FinishReason.CONTENT_FILTER, of.ended


def _pieces(
    sample: _HookedSample, parts: Sequence[AnswerPart], *, ended: bool
) -> Iterator[tuple[AnswerPart, bool]]:
    """The parts of a delta, each with whether it is the last of its region; an empty one closes a region that is open.

    Where a text ends the region is known with the next part, so the last part of a delta is looked at with its end.
    """
    for number, part in enumerate(parts):
        kind = PartKind(sample.chunk.kind)
        if sample.open and (part.kind is not kind or part.call != sample.call):
            sample.open = False
            yield AnswerPart(kind, "", sample.call), True
        if part.kind is PartKind.CALL:
            yield part, False
            continue
        after = parts[number + 1] if number + 1 < len(parts) else None
        last = ended if after is None else (after.kind, after.call) != (part.kind, part.call)
        sample.open, sample.call = not last, part.call
        yield part, last
    if ended and (sample.open or not parts):
        yield AnswerPart(PartKind(sample.chunk.kind), "", sample.call), True
