"""Time that passes only when nothing else is to do: waits cost nothing and every duration is exact."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        real = self._selector  # type: ignore[attr-defined]
        select = real.select

        def jump(timeout: float | None = None) -> Any:
            events = select(0)
            if not events:
                if timeout is None:
                    raise RuntimeError("nothing left to happen")
                self.now += timeout
            return events

        real.select = jump

    def time(self) -> float:
        return self.now


def run(work: Callable[[VirtualLoop], Awaitable[Any]]) -> Any:
    """Run a coroutine function on a virtual loop."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work(loop))  # type: ignore[arg-type]
    finally:
        loop.close()


def clocks_of(loop: VirtualLoop, patch: pytest.MonkeyPatch, wall: Callable[[], float]) -> None:
    """The clocks of this process are that of a loop; the time of day is `wall`."""
    for name in ("monotonic", "perf_counter"):
        patch.setattr(time, name, loop.time)
    patch.setattr(time, "time", wall)
