"""A profile of the engine's steps, as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.api import Engine, EngineUnavailableError
from quire.server.errors import ApiError, bad_request
from quire.steplog.explain import STAGES

MAX_STEPS = 200_000  # of a profile; some 60 MB of trace
_POLL_SECONDS = 0.1  # an engine keeps its latest steps only
_PHASES = ("schedule", "execute", "update")
_SHOWN = (
    "step", "rows", "prefill_tokens", "decode_tokens", "context_tokens", "blocks_used", "running", "waiting",
    "preempted", "drafted", "accepted",
)  # fmt: skip


class StepProfile:
    """The steps of an engine from `start` to `stop`, or MAX_STEPS of them, written to a new file in a folder."""

    def __init__(self, engine: Engine, folder: str | None) -> None:
        self._engine, self._folder = engine, folder
        self._task: asyncio.Task[None] | None = None
        self._steps: list[Mapping[str, Any]] = []
        self._since = 0.0
        self._hearing: list[Callable[[Sequence[Mapping[str, Any]]], None]] = []

    async def start(self) -> None:
        """Begin. Raises ApiError without a folder, for one that cannot be made, or while a profile runs."""
        if self._folder is None:
            raise bad_request(
                None, "profiles are off; a server with --profile-dir writes them", "profiles_off"
            )
        if self._task is not None:
            raise ApiError(409, "a profile has begun; POST /stop_profile writes it", code="profile_runs")
        try:
            await asyncio.to_thread(Path(self._folder).mkdir, parents=True, exist_ok=True)
        except OSError as error:
            raise ApiError(
                500, f"profile_dir: cannot be made: {error.strerror}", code="profile_failed"
            ) from None
        self._steps, self._since = [], time.monotonic()
        with contextlib.suppress(EngineUnavailableError):
            await self._engine.debug(stages=True)
        self._task = asyncio.create_task(self._collect())

    async def stop(self) -> str:
        """End, and write the trace; returns its file name. Raises ApiError unless a profile runs, or if it cannot be
        written.
        """
        task, self._task = self._task, None
        if task is None:
            raise ApiError(409, "no profile runs; POST /start_profile begins one", code="no_profile")
        task.cancel()
        await asyncio.wait([task])
        await self._end()
        name, steps = f"steps-{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns()}.json", self._steps
        self._steps = []
        try:
            await asyncio.to_thread(self._write, name, steps)
        except OSError as error:
            message = f"profile_dir: the trace cannot be written: {error.strerror}"
            raise ApiError(500, message, code="profile_failed") from None
        return name

    def after_next(self, hear: Callable[[Sequence[Mapping[str, Any]]], None]) -> bool:
        """Call `hear` with the steps of the profile once all that have run by now are among them. False while no
        profile runs, and with several replicas: a step does not say whose it is.
        """
        if self._task is None or self._task.done() or len(self._engine.stats.replica_requests) > 1:
            return False
        self._hearing.append(hear)
        return True

    def tell(self, count: int | None = None) -> None:
        """Call those who wait for steps, or the first so many."""
        heard, self._hearing = self._hearing[:count], [] if count is None else self._hearing[count:]
        for hear in heard:
            hear(self._steps)

    async def _collect(self) -> None:
        while len(self._steps) < MAX_STEPS:
            with contextlib.suppress(EngineUnavailableError):
                await self._take()
            await asyncio.sleep(_POLL_SECONDS)
        await self._end()

    async def _end(self) -> None:
        """From now on steps are not timed."""
        with contextlib.suppress(EngineUnavailableError):
            await self._take(more=False)
        self.tell()

    async def _take(self, *, more: bool = True) -> None:
        """Add the steps that began since the last one; `more` are to follow, with their stages."""
        waited = len(self._hearing)
        found = (await self._engine.debug(stages=more))["steps"]
        last = self._steps[-1]["start"] if self._steps else self._since
        self._steps += [step for step in found if step["start"] > last][: MAX_STEPS - len(self._steps)]
        self.tell(waited)

    def _write(self, name: str, steps: list[Mapping[str, Any]]) -> None:
        missed = steps[-1]["step"] - steps[0]["step"] + 1 - len(steps) if steps else 0
        facts = {"steps": len(steps), "missed_steps": missed}
        events = [event for step in steps for event in _events(step)]
        text = msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events, "otherData": facts})
        assert self._folder is not None
        (Path(self._folder) / name).write_bytes(text)


def _events(step: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A step and its phases as complete events; times in microseconds."""
    at = step["start"] * 1e6
    lengths = [step[f"{phase}_seconds"] * 1e6 for phase in _PHASES]
    shown = {name: step[name] for name in _SHOWN}
    yield {"name": "step", "ph": "X", "pid": 1, "tid": 1, "ts": at, "dur": sum(lengths), "args": shown}
    for phase, length in zip(_PHASES, lengths, strict=True):
        yield {"name": phase, "ph": "X", "pid": 1, "tid": 1, "ts": at, "dur": length}
        at += length
        if phase == "execute":
            yield from _stage_events(step["stage_seconds"], at)


def _stage_events(seconds: Sequence[float], end: float) -> Iterator[dict[str, Any]]:
    """The stages of a step one after the other, up to the `end` of its execution; before them it was prepared."""
    lengths = [each * 1e6 for each in seconds]
    at = end - sum(lengths)
    for stage, length in zip(STAGES, lengths, strict=False):
        yield {"name": stage, "ph": "X", "pid": 1, "tid": 1, "ts": at, "dur": length}
        at += length
