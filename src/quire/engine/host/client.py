"""One engine as the API process sees it, across restarts: commands go down, steps come up."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from msgspec import structs

from quire.config.live import LiveEngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import REQUESTS, EngineState, EngineStats, EngineUnavailableError
from quire.engine.host.held import memory_held
from quire.engine.host.hosts import Host
from quire.engine.host.memory_ledger import LedgerEntry
from quire.engine.host.messages import (
    AdapterOpened,
    AskLog,
    AskRecords,
    AskView,
    CacheChanged,
    CacheWatched,
    Command,
    Configure,
    Configured,
    GivePages,
    Load,
    LogRows,
    Ready,
    Records,
    Refused,
    Report,
    Stats,
    StepReport,
    Viewed,
)
from quire.engine.host.supervisor import Hooks, Supervisor
from quire.engine.view import EngineView

logger = logging.getLogger("quire.engine")

T = TypeVar("T")
_RECORDS = 256
_DEBUG_SECONDS = 2.0
_CONFIGURE_SECONDS = 10.0


class EngineListener(Protocol):
    """The front of an engine. `engine_lost` comes before a restart, `engine_ready` after each (re)start."""

    def engine_ready(self, facts: Ready) -> None: ...

    def engine_lost(self, reason: str) -> int:
        """End what was being computed. Returns how many deaths, this one and earlier ones, have a known cause that will
        not recur.
        """

    def stepped(self, step: StepReport) -> None: ...

    def refused(self, report: Refused) -> None: ...

    def adapter_opened(self, report: AdapterOpened) -> None: ...

    def cache_reported(self, report: CacheWatched | CacheChanged) -> None:
        """What the engine's cache holds has changed, or is reported from now on."""

    def counted(self, stats: EngineStats) -> None:
        """The engine's latest report."""

    def working(self) -> bool:
        """Whether the engine has work."""

    def tick(self, now: float) -> None:
        """Called a few times a second."""

    def opening(self, load: Load) -> Load:
        """What is loaded by a start that is about to be."""

    def used(self, own: float | None) -> float | None:
        """Seconds of processors that the engine's steps have used, with its process's own."""


class EngineClient:
    """Starts an engine, sends commands, and passes its reports to a listener. Belongs to one event loop."""

    def __init__(
        self,
        load: Load,
        serving: ServingConfig,
        new_host: Callable[[], Host],
        listener: EngineListener,
        memory: LedgerEntry | None = None,
    ) -> None:
        if memory is not None:
            load = structs.replace(load, lent=memory.most_borrowed)
        self.facts: Ready | None = None  # of the latest start
        self._listener = listener
        self._supervisor = Supervisor(
            load,
            serving,
            new_host,
            Hooks(
                self._receive,
                listener.engine_lost,
                self._ready,
                listener.working,
                listener.tick,
                listener.opening,
                listener.used,
            ),
            memory,
        )
        self._memory = memory
        self._stats = EngineStats()  # as of the last report
        self._running = self._waiting = 0  # sequences, as of the last step
        self._records: list[asyncio.Future[list[Any]]] = []
        self._logs: list[asyncio.Future[bytes]] = []
        self._views: list[asyncio.Future[EngineView]] = []
        self._configuring: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count(1)

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def pid(self) -> int | None:
        """Process id of the engine process; None for a thread, or while there is none."""
        return self._supervisor.pid

    @property
    def cpu_seconds(self) -> float:
        """Of the engine's process so far; 0 where nobody knows."""
        return self._supervisor.cpu_seconds

    @property
    def restarts(self) -> int:
        """Starts of the engine after its first."""
        return self._supervisor.restarts

    @property
    def request_memory(self) -> int:
        """Bytes of the memory plan for requests; 0 before there is a plan."""
        return self.facts.memory_parts[REQUESTS] if self.facts else 0

    async def start(self, progress: Callable[[int, int], None] | None) -> None:
        """The first start. Raises the errors of loading; nothing has to be stopped then."""
        await self._supervisor.start(progress)

    async def failed(self) -> None:
        """Returns when the engine has been given up."""
        await self._supervisor.given_up.wait()

    def drain(self) -> None:
        """From now on the engine is not restarted when it dies."""
        self._supervisor.drain()

    async def stop(self) -> None:
        """End the engine."""
        await self._supervisor.stop()

    def rest(self) -> None:
        """Refuse requests from now on. Raises EngineUnavailableError unless the engine is ready."""
        self._supervisor.rest()

    async def give_back(self, level: int) -> None:
        """Give memory back once nothing runs: pages at level 1, the process at level 2."""
        if level == 1:
            self.send(GivePages())
        else:
            await self._supervisor.end_process()

    async def wake(self) -> None:
        """The end of a sleep. Raises the errors of loading."""
        await self._supervisor.wake()

    def send(self, command: Command) -> None:
        """Send a command; it is lost when the engine is dead."""
        self._supervisor.send(command)

    def kill(self, reason: str) -> None:
        """End the process, which is started again."""
        self._supervisor.kill(reason)

    def began(self) -> None:
        """An idle engine gets work."""
        self._supervisor.began()

    async def ping(self, timeout: float) -> bool:
        """Whether the engine answers within `timeout` seconds."""
        return await self._supervisor.ping(timeout)

    @property
    def reported(self) -> EngineStats:
        """The engine's last report as it came."""
        return self._stats

    def stats(
        self, *, waiting_tokens: int, wasted_tokens: int, calls: Mapping[str, int], words: tuple[int, int]
    ) -> EngineStats:
        """The engine's last report, with the counts that only its front has."""
        return replace(
            self._stats,
            running=self._running,
            waiting=self._waiting,
            waiting_tokens=waiting_tokens,
            wasted_tokens=wasted_tokens,
            restarts=self.restarts,
            memory_parts=self.facts.memory_parts if self.facts else {},
            calls=calls,
            words=words,
            borrowed_bytes=self._memory.borrowed if self._memory else 0,
            lent_bytes=self._memory.lent if self._memory else 0,
        )

    async def records(self, stages: bool) -> list[Any]:
        """The latest step records; later ones have `stages`, or none. Raises EngineUnavailableError."""
        return await self._answer(self._records, AskRecords(_RECORDS, stages))

    async def log(self) -> bytes:
        """The latest rows of the log. Raises EngineUnavailableError when the engine does not answer."""
        return await self._answer(self._logs, AskLog())

    async def view(self, after: int) -> EngineView:
        """What the engine holds. Raises EngineUnavailableError when the engine does not answer."""
        return await self._answer(self._views, AskView(after))

    async def _answer(self, waiting: list[asyncio.Future[T]], command: Command) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting.append(answer)
        self.send(command)
        try:
            async with asyncio.timeout(_DEBUG_SECONDS):
                return await answer
        except TimeoutError:
            raise EngineUnavailableError(f"the engine did not answer within {_DEBUG_SECONDS:g} s") from None
        finally:
            waiting.remove(answer)

    async def configure(self, live: LiveEngineConfig) -> None:
        """Raises ValueError if the engine refuses, EngineUnavailableError if it does not answer."""
        number = next(self._numbers)
        answer = self._configuring[number] = asyncio.get_running_loop().create_future()
        self.send(Configure(number, live))
        try:
            async with asyncio.timeout(_CONFIGURE_SECONDS):
                if error := await answer:
                    raise ValueError(error)
        except TimeoutError:
            raise EngineUnavailableError(
                f"the engine did not answer within {_CONFIGURE_SECONDS:g} s"
            ) from None
        finally:
            del self._configuring[number]

    async def memory(self, compiler: int | None) -> Mapping[str, Any]:
        """What each process holds, by part, and the plan; see docs/memory.md. `compiler`: the id of the process that
        compiles grammars, if there is one.
        """
        if self.facts is None:
            raise EngineUnavailableError("the engine is loading")
        measured = await asyncio.to_thread(memory_held, self.pid, compiler, self.facts.memory_areas)
        return {
            "bound": self.facts.memory_bound,
            "planned": dict(self.facts.memory_parts),
            "resident": sum(sum(parts.values()) for parts in measured.values()),
            "processes": measured,
        }

    def _ready(self, facts: Ready) -> None:
        self.facts = facts
        self._listener.engine_ready(facts)

    def _receive(self, report: Report) -> None:
        match report:
            case StepReport():
                self._running, self._waiting = report.running, report.waiting
                self._listener.stepped(report)
            case Stats():
                self._stats = report.stats
                self._listener.counted(report.stats)
                self._running, self._waiting = report.stats.running, report.stats.waiting
            case Refused():
                self._listener.refused(report)
            case AdapterOpened():
                self._listener.adapter_opened(report)
            case CacheWatched() | CacheChanged():
                self._listener.cache_reported(report)
            case Configured(0, error):
                if error:
                    logger.error(
                        "the engine runs with other settings than those that were asked for: %s", error
                    )
            case Configured(number, error):
                if (waiting := self._configuring.get(number)) is not None and not waiting.done():
                    waiting.set_result(error)
            case _:
                self._receive_answer(report)

    def _receive_answer(self, report: Report) -> None:
        match report:
            case Records(records):
                _give(self._records, records)
            case LogRows(data):
                _give(self._logs, data)
            case Viewed(view):
                _give(self._views, view)
            case _:
                logger.warning("the engine sent an unexpected message: %s", type(report).__name__)


def _give(waiting: list[asyncio.Future[T]], found: T) -> None:
    for answer in waiting:
        if not answer.done():
            answer.set_result(found)
