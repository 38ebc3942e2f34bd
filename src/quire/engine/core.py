"""EngineCore: the loop schedule → execute → update, and a record of every step."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Protocol

from quire.core.batch_gate import BatchGate
from quire.core.scheduler import Scheduler
from quire.types import FinishReason, Request, SchedulerOutput, SeqEvent, StepOutput, StepRecord

RECORDS_KEPT = 4096


class StepExecutor(Protocol):
    """Runs a scheduled step: a worker, or in a simulator a model of its timing."""

    def execute(self, out: SchedulerOutput) -> StepOutput:
        """Run one step; row i of the result belongs to out.scheduled[i]."""


class EngineCore:
    """One scheduler and one worker. Not thread-safe: one thread calls it.

    With a gate, `ready_in` says how long a batch is still being collected; `step` runs what is there at any time.
    """

    def __init__(self, scheduler: Scheduler, worker: StepExecutor, gate: BatchGate | None = None) -> None:
        self.scheduler = scheduler
        self._worker = worker
        self.records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self.last_phases: dict[str, float] = {}
        self.started: list[str] = []  # requests that the last step started or resumed
        self._gate = gate

    @property
    def worker(self) -> StepExecutor:
        """The object that runs the steps."""
        return self._worker

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it could never complete."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> list[SeqEvent]:
        """End a request now; returns its final events."""
        return self.scheduler.abort(request_id)

    def finish(self, request_id: str, sample_index: int) -> SeqEvent | None:
        """End one sample because its text contains a stop string; returns its final event."""
        return self.scheduler.finish(request_id, sample_index, FinishReason.STOP)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def ready_in(self) -> float | None:
        """Seconds until a step can run, 0 for now; None: not before a request is added."""
        if not self.scheduler.has_work():
            return None
        if self._gate is None:
            return 0.0
        opens = self._gate.opens(self.scheduler)
        return None if opens == math.inf else max(0.0, opens - time.monotonic())

    def step(self) -> list[SeqEvent]:
        """Run one step; returns what it changed, in row order."""
        start = time.perf_counter()
        preempted = self.scheduler.num_preemptions
        out = self.scheduler.schedule()
        counts = self.scheduler.step_counts
        scheduled = time.perf_counter()
        self.started = [new.request_id for new in out.new]
        result = self._worker.execute(out)
        executed = time.perf_counter()
        events = self.scheduler.update(out, result)
        updated = time.perf_counter()
        self.last_phases = result.seconds
        self.records.append(
            StepRecord(
                step=out.step,
                start=start,
                schedule_seconds=scheduled - start,
                execute_seconds=executed - scheduled,
                update_seconds=updated - executed,
                rows=len(out.scheduled),
                prefill_tokens=counts.prefill_tokens,
                decode_tokens=counts.decode_tokens,
                context_tokens=counts.context_tokens,
                blocks_used=self.scheduler.blocks_used,
                running=self.scheduler.num_running,
                waiting=self.scheduler.num_waiting,
                preempted=self.scheduler.num_preemptions - preempted,
            )
        )
        return events
