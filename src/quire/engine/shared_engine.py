"""SharedEngine: one SyncEngine for several streams, calls and threads at once.

It has no thread of its own. A caller that needs a token takes a turn: it finds what other callers' turns have left
for it, or runs one step for all. So a single caller pays nothing for the possibility of others.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.engine.api import Ask
from quire.engine.build.assemble import Built
from quire.engine.front.forming import asked_part
from quire.engine.sync_engine import SyncEngine, TextDelta
from quire.outputs import RequestOutput
from quire.types import QuireError, SamplingParams
from quire.util.turns import Turns, interrupts_wait

if TYPE_CHECKING:
    from quire.lora.adapter_service import AdapterService, Open
    from quire.text.reading import Reading


class SharedEngine:
    """Any thread may call any method. Raises QuireError after `close`, after a failed step, and in a forked child."""

    def __init__(self, built: Built) -> None:
        self._engine = SyncEngine(built)
        self._turns = Turns()
        self._news: dict[str, deque[TextDelta]] = {}  # by stream: deltas made and not read
        self._dropped: deque[str] = deque()  # streams garbage-collected during another turn
        self._ended = ""  # why no step can run any more
        self._pid = os.getpid()

    def add(self, asks: Sequence[Ask], *, stream: bool = False) -> list[RequestOutput]:
        """Queue all of the requests or none; with `stream` their deltas are kept for `read`. Raises RequestError."""
        self._check()
        encoded = [self._engine.encode(ask) for ask in asks]
        for ask in asks:  # before the turn: it may take long
            if ask.reading is None or ask.reading.tools is None:
                if ask.params.structured is not None:
                    self._engine.compile(ask.params.structured)
            else:
                self._compile_parts(ask.reading, ask.params)
        outputs: list[RequestOutput] = []
        with self._turns:
            self._check()
            try:
                for ask, ids in zip(asks, encoded, strict=True):
                    outputs.append(self._engine.add(ask, ids))
            except BaseException:
                self._abort(outputs)
                raise
            if stream:
                self._news |= {output.request_id: deque() for output in outputs}
        return outputs

    def _compile_parts(self, reading: Reading, params: SamplingParams) -> None:
        """Have the schemas of functions, and the format of the text, compiled: they are known from then on."""
        from quire.structured.answer_form import AnswerPlan

        for part in AnswerPlan(reading=reading, response=asked_part(params)).asks():
            self._engine.compile(part.ask)

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Run a step unless all of these have already finished."""
        self._check()
        with self._turns:
            if not all(output.finished for output in outputs):
                self._step()

    def read(self, output: RequestOutput) -> TextDelta | None:
        """The next delta of a stream, after as many steps as needed; None at its end."""
        self._check()
        while True:
            with self._turns:
                news = self._news.get(output.request_id)
                if news:
                    return news.popleft()
                if output.finished or news is None:
                    self._news.pop(output.request_id, None)
                    return None
                self._step()

    def abort(self, outputs: Sequence[RequestOutput]) -> None:
        """End requests now; does nothing for those that have ended."""
        if os.getpid() != self._pid:
            return
        with self._turns:
            self._abort(outputs)

    def drop(self, output: RequestOutput) -> None:
        """Like `abort`, for a finalizer: it may run at any moment, even during a turn of the same thread."""
        if os.getpid() != self._pid:
            return
        self._dropped.append(output.request_id)
        if self._turns.acquire(blocking=False):
            try:
                self._abort_dropped()
            finally:
                self._turns.release()

    @property
    def adapters(self) -> AdapterService:
        """The adapters of the engine. Raises RequestError without enable_lora."""
        return self._engine.adapters

    def load_adapter(self, name: str, opener: Open) -> None:
        """Have a name stand for an adapter; see AdapterService.register."""
        with self._turns:
            self._check()
            self._engine.adapters.register(name, opener)

    def unload_adapter(self, name: str) -> None:
        """Have a name stand for nothing; see AdapterService.unregister."""
        with self._turns:
            self._check()
            self._engine.adapters.unregister(name)

    def close(self) -> bool:
        """End all requests. True for the first call in the process that made this engine."""
        if os.getpid() != self._pid:
            return False
        with self._turns:
            first = self._ended != _CLOSED
            self._ended = _CLOSED
            self._engine.close()
        return first

    def _step(self) -> None:
        self._check()
        self._abort_dropped()
        with interrupts_wait():
            try:
                deltas = self._engine.step()
            except BaseException as error:
                # The scheduler has started a step whose end it will never see.
                self._ended = f"a step failed ({type(error).__name__}: {error}); create a new LLM"
                raise
        for delta in deltas:
            news = self._news.get(delta.request_id)
            if news is not None:
                news.append(delta)

    def _abort(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self._news.pop(output.request_id, None)
            if not output.finished and not self._ended:
                self._engine.abort(output.request_id)

    def _abort_dropped(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            if self._news.pop(request_id, None) is not None and not self._ended:
                self._engine.abort(request_id)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise QuireError(
                f"this LLM belongs to process {self._pid}: its threads do not exist in a forked child. "
                "Create the LLM in the process that uses it"
            )
        if self._ended:
            raise QuireError(self._ended)


_CLOSED = "this LLM is closed; create a new one"
