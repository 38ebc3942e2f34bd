"""Simulations beside the server, in a process of their own, one at a time for all models.

The process has only idle processors, and bounds on its memory, which is in the plan, and on its time. A check of the
simulator gives way to an administrator's question.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from quire.config.serving import ServingConfig
from quire.engine.api import Engine, EngineState, EngineUnavailableError
from quire.server.errors import ApiError, bad_request
from quire.server.metrics import ServerMetrics, SimulatorCheck

_CPU_SECONDS, _WALL_SECONDS = 60, 300  # of a what-if
_CHECK_SECONDS = 20  # of CPU, of a check
_CHECK_SHARE = 200  # a check takes at most this part of one processor
_CHECK_REQUESTS = 20  # the fewest that are worth a check
_COPIES = 4 * 2**20  # of the log, in this process and in a pipe


class Simulations:
    """The process that simulates, for all models of a server."""

    def __init__(self, config: ServingConfig) -> None:
        self._memory, self._interval = config.simulator_memory, config.simulator_interval
        self._turn = asyncio.Lock()
        self._asked = False
        self._checking: asyncio.Task[dict[str, Any]] | None = None
        self.engines: Callable[[], Mapping[str, Engine]] = dict  # by model, on a server of several

    @property
    def on(self) -> bool:
        """Whether there are simulations."""
        return self._memory is not None

    async def what_if(
        self, engine: Engine, asked: Mapping[str, Any], like: Engine | None = None
    ) -> dict[str, Any]:
        """What the load of an engine would have been, on that of `like` if it is given. Raises ApiError 409 while
        another one runs, 400 for what cannot be simulated, 504 for what takes too long.
        """
        if self._asked:
            raise ApiError(409, "another what-if runs: ask again later", code="what_if_runs")
        self._asked = True
        try:
            if self._checking is not None:
                self._checking.cancel()
            async with self._turn:
                question = {**asked, "seconds": _CPU_SECONDS}
                answer = await self._simulate(engine, question, _WALL_SECONDS, like)
        except TimeoutError:
            raise _too_long(f"{_WALL_SECONDS} s") from None
        finally:
            self._asked = False
        if "error" in answer:
            if answer.get("too_long"):
                raise _too_long(f"{_CPU_SECONDS} s of a processor")
            raise bad_request(None, f"what-if: {answer['error']}", code="not_simulated")
        return answer

    async def check_always(self, engine: Engine, metrics: ServerMetrics) -> None:
        """Check the simulator against the latest load of a model again and again; runs until cancelled."""
        pause = self._interval
        while self.on and self._interval:
            await asyncio.sleep(pause)
            ended = sum(metrics.histograms["e2e"].histogram.counts)
            if self._asked or engine.state is not EngineState.READY or ended < _CHECK_REQUESTS:
                continue
            asked: dict[str, Any] = {
                "set": None, "slo": [], "seeds": 1, "last": math.inf, "least": _CHECK_REQUESTS,
                "seconds": _CHECK_SECONDS,
            }  # fmt: skip
            async with self._turn:
                check = self._checking = asyncio.create_task(self._simulate(engine, asked, _WALL_SECONDS))
                try:
                    found = await _outcome(check)
                finally:
                    check.cancel()
                    self._checking = None
            taken = 0 if check.cancelled() else found.get("seconds", _CHECK_SECONDS)  # 0: it gave way
            pause = max(self._interval, _CHECK_SHARE * taken)
            if found.get("errors"):
                metrics.simulator = SimulatorCheck(found["errors"], found["requests"], time.time())
            elif "errors" in found:  # the record is too short
                metrics.simulator = None

    async def _simulate(
        self, engine: Engine, asked: Mapping[str, Any], most: float, like: Engine | None = None
    ) -> dict[str, Any]:
        """Raises TimeoutError after so many seconds."""
        log, other = await engine.log(), b"" if like is None else await like.log()
        if not log or (like is not None and not other):
            return {"error": "this engine keeps no log"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "quire.bench.what_if_process",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert process.stdin is not None
            memory = (self._memory or 0) - _COPIES
            line = json.dumps({**asked, "memory": memory, "like": len(other)})
            process.stdin.write(line.encode() + b"\n")
            async with asyncio.timeout(most):
                out, _ = await process.communicate(log + other)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.returncode:
            return {"error": "the simulation has ended before its time", "too_long": True}
        answer: dict[str, Any] = json.loads(out)
        return answer


async def _outcome(task: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
    """What a check has found; nothing of one that gave way or failed."""
    await asyncio.wait([task])
    if task.cancelled():
        return {}
    with contextlib.suppress(TimeoutError, EngineUnavailableError):
        return task.result()
    return {}


def _too_long(limit: str) -> ApiError:
    return ApiError(504, f"the simulation needs more than {limit}: use last or fewer seeds", code="too_long")
