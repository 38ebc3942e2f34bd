"""Send a workload, open loop or closed loop, and record every request.

Open loop: sessions start at given times, whatever the server does. Closed loop: a fixed number of clients; each starts
its next session when the previous one has ended. Within a session, a turn is due `think` seconds after the previous
answer. The clock of a request starts when it is due, so waiting for a connection or a slow client counts in its
latencies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from quire.bench.timeline import RequestRecord
from quire.bench.workloads import Session, Turn
from quire.util.http_client import Clock

LAG_EVERY = 0.05  # seconds between measurements of the event loop's lag


class Sender(Protocol):
    """Sends one request. Records a failure instead of raising it."""

    async def send(self, turn: Turn, history: list[str], record: RequestRecord) -> str:
        """Send a turn after `history` (prompts and answers in turn, oldest first), fill the times of the record on the
        clock of the load, and return the text of the answer."""


class LoadRun:
    """One run of a workload. `records` are in the order in which requests end; times are seconds from its start."""

    def __init__(
        self,
        sender: Sender,
        clock: Clock,
        *,
        timeout: float | None = None,
        max_in_flight: int | None = None,
        ended: Callable[[RequestRecord], None] = lambda _record: None,
    ) -> None:
        self.records: list[RequestRecord] = []
        self.started = 0
        self.lags: list[float] = []
        self._sender, self._clock, self._timeout, self._ended = sender, clock, timeout, ended
        self._slots = asyncio.Semaphore(max_in_flight) if max_in_flight else None
        self._zero = 0.0
        self._stop_at: float | None = None

    def now(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._zero

    async def open(
        self, sessions: Sequence[Session], times: Sequence[float], duration: float | None = None
    ) -> None:
        """Start session i at times[i], ascending; sessions due after `duration` seconds are skipped."""
        self._zero, self._stop_at = self._clock(), duration
        lag = asyncio.create_task(self._watch_lag())
        try:
            async with asyncio.TaskGroup() as group:
                for session, at in zip(sessions, times, strict=True):
                    if duration is not None and at > duration:
                        break
                    await self._until(at)
                    group.create_task(self._session(session, at))
        finally:
            lag.cancel()

    async def closed(self, sessions: Sequence[Session], clients: int, duration: float | None = None) -> None:
        """Run `clients` sessions at once; start no more after `duration` seconds."""
        self._zero, self._stop_at = self._clock(), duration
        left = iter(sessions)

        async def client() -> None:
            for session in left:
                if duration is not None and self.now() >= duration:
                    return
                await self._session(session, self.now())

        lag = asyncio.create_task(self._watch_lag())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(clients):
                    group.create_task(client())
        finally:
            lag.cancel()

    async def _session(self, session: Session, at: float) -> None:
        history: list[str] = []
        due = at
        for place, turn in enumerate(session.turns):
            if place:
                if self._stop_at is not None and self.now() >= self._stop_at:
                    return
                due = self.now() + turn.think
                await self._until(due)
            record = RequestRecord(index=self.started, scheduled=due, asked_tokens=turn.output_tokens)
            record.session = -1 if len(session.turns) == 1 else record.index - place
            self.started += 1
            answer = await self._request(turn, history, record)
            if record.failed:
                return  # later turns depend on an answer that never arrived
            history += [answer]

    async def _request(self, turn: Turn, history: list[str], record: RequestRecord) -> str:
        answer = ""
        if self._slots is not None:
            await self._slots.acquire()
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._sender.send(turn, history, record)
        except TimeoutError:
            record.error = "timeout"
        finally:
            if self._slots is not None:
                self._slots.release()
        record.closed = self.now()
        self._shift(record)
        self.records.append(record)
        self._ended(record)
        return answer

    def _shift(self, record: RequestRecord) -> None:
        """Convert clock readings to seconds from the start of the run."""
        zero = self._zero
        record.times = [at - zero for at in record.times]
        record.sent = None if record.sent is None else record.sent - zero
        record.finished = None if record.finished is None else record.finished - zero

    async def _until(self, at: float) -> None:
        while (left := at - self.now()) > 0:
            await asyncio.sleep(left)

    async def _watch_lag(self) -> None:
        while True:
            due = self._clock() + LAG_EVERY
            await asyncio.sleep(LAG_EVERY)
            self.lags.append(max(0.0, self._clock() - due))
