"""A pulse for streams that say nothing for long: a long prefill, or a place far back in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

_LOOKS = 4  # between two pulses


class Heartbeat:
    """A context in which `beat` is called whenever `sent` has been the same number for `seconds`, or up to a quarter
    less; never with 0 seconds. Nothing has to be called for what is sent: a stream of tokens costs nothing.
    """

    def __init__(self, seconds: float, sent: Callable[[], int], beat: Callable[[], None]) -> None:
        self._pause = seconds / _LOOKS
        self._sent, self._beat = sent, beat
        self._before, self._same = 0, 0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._pause:
            self._wait()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._look)

    def _look(self) -> None:
        before, self._before = self._before, self._sent()
        self._same = self._same + 1 if self._before == before else 0
        if self._same >= _LOOKS - 1:
            self._same = 0
            self._beat()
        self._wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
