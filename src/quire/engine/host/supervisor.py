"""Keeps an engine running: starts it, watches it, restarts it when it dies, and gives up after repeated failures."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine

from quire.config.serving import ServingConfig
from quire.engine.api import EngineState, EngineUnavailableError
from quire.engine.host.connection import EngineConnection
from quire.engine.host.hosts import Host
from quire.engine.host.memory_ledger import LedgerEntry
from quire.engine.host.messages import (
    Command,
    GrantRoom,
    Load,
    Ping,
    Pong,
    Ready,
    Report,
    StepReport,
    UsesRoom,
)
from quire.engine.host.watchdog import Verdict, Watchdog
from quire.records import dataclass
from quire.types import QuireError

logger = logging.getLogger("quire.engine")

_WINDOW_SECONDS = 600.0
_FIRST_DELAY, _MAX_DELAY = 0.1, 30.0
_MAX_TICK = 0.25


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of a supervisor. `opening`, of what is about to be loaded, and `lost` come before a (re)start, `ready`
    after each.

    `lost` returns how many deaths, this one and earlier ones, have a known cause that will not recur.
    """

    report: Callable[[Report], None]
    lost: Callable[[str], int]
    ready: Callable[[Ready], None]
    working: Callable[[], bool]
    tick: Callable[[float], None]
    opening: Callable[[Load], Load]
    used: Callable[[float | None], float | None]


class Supervisor:
    """State of one engine over all its lives. Everything happens on one event loop."""

    def __init__(
        self,
        load: Load,
        serving: ServingConfig,
        new_host: Callable[[], Host],
        hooks: Hooks,
        memory: LedgerEntry | None = None,
    ) -> None:
        self.state = EngineState.STARTING
        self.given_up = asyncio.Event()
        self._load, self._serving, self._new_host, self._hooks = load, serving, new_host, hooks
        self._connection: EngineConnection | None = None
        self._memory = memory
        self.restarts = 0
        self._failures: deque[float] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dying: set[Host] = set()  # killed, and not yet known to have ended
        self._watchdog = Watchdog(serving.stall_timeout, time.monotonic())
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._connection.host.pid if self._connection else None

    @property
    def cpu_seconds(self) -> float:
        """Of the engine's process so far; 0 where nobody knows."""
        return (self._connection.host.cpu_seconds() or 0.0) if self._connection else 0.0

    async def start(self, progress: Callable[[int, int], None] | None) -> None:
        """The first start. Raises the errors of loading; nothing has to be stopped then."""
        self._hooks.ready(await self._open(progress))
        self.state = EngineState.READY
        self._spawn(self._watch())

    def drain(self) -> None:
        """From now on requests are refused, and the engine is not restarted when it dies."""
        self.state = EngineState.DRAINING

    async def stop(self) -> None:
        """Stop the engine and everything that watches it."""
        self.state = EngineState.DRAINING
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*[host.ended() for host in self._dying])
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        self._left(stays=False)

    def rest(self) -> None:
        """From now on requests are refused; those that run go on."""
        if self.state is not EngineState.READY:
            raise EngineUnavailableError(
                f"only an engine that is ready can be put to sleep; this one is {self.state}"
            )
        self.state = EngineState.SLEEPING

    async def end_process(self) -> None:
        """End the process of an engine that sleeps."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
            self._left()

    async def wake(self) -> None:
        """The end of a sleep: the process starts again if it was ended. Raises the errors of loading, and sleeps on."""
        if self._connection is None:
            self._hooks.ready(await self._open(None))
        if self.state is EngineState.SLEEPING:
            self.state = EngineState.READY

    def send(self, command: Command) -> None:
        """Send a command to the engine; lost when the engine is dead, like its request."""
        if self._connection is not None:
            self._connection.send(command)

    def kill(self, reason: str) -> None:
        """End the process, which is started again."""
        if self._connection is not None:
            logger.error("killing the engine: %s", reason)
            self._connection.host.kill()

    def began(self) -> None:
        """An idle engine gets work."""
        self._watchdog.began(time.monotonic())

    async def ping(self, timeout: float) -> bool:
        """Whether the engine answers within `timeout` seconds, between two of its steps."""
        number = next(self._numbers)
        answer = self._pings[number] = asyncio.get_running_loop().create_future()
        self.send(Ping(number))
        try:
            async with asyncio.timeout(timeout):
                await answer
        except TimeoutError:
            return False
        finally:
            self._pings.pop(number, None)
        return True

    async def _open(self, progress: Callable[[int, int], None] | None) -> Ready:
        connection, memory = EngineConnection(self._new_host(), self._receive, self._lost), self._memory
        if memory is not None:
            await memory.enter(lambda number, own, lent: connection.send(GrantRoom(number, own, lent)))
        try:
            ready = await connection.open(self._hooks.opening(self._load), progress)
        except BaseException:
            self._left()
            raise
        if memory is not None:
            blocks = ready.memory_parts["kv"]
            memory.loaded(sum(ready.memory_parts.values()) - blocks, blocks)
        self._connection = connection
        self._watchdog = Watchdog(self._serving.stall_timeout, time.monotonic())
        return ready

    def _left(self, *, stays: bool = True) -> None:
        """The engine's process has ended; what this process has for it, its tokenizer, may stay."""
        if self._memory is not None:
            self._memory.leave(sum(self._load.beside.values()) if stays else 0)

    def _receive(self, report: Report) -> None:
        now = time.monotonic()
        if isinstance(report, StepReport):
            self._watchdog.stepped(report.end - report.start, now)
        else:
            self._watchdog.answered(now)
        if self.state is EngineState.STALLED:
            logger.warning("the engine is responding again")
            self.state = EngineState.READY
        if isinstance(report, Pong):
            answer = self._pings.get(report.number)
            if answer is not None and not answer.done():
                answer.set_result(None)
        elif isinstance(report, UsesRoom):
            if self._memory is not None:
                self._memory.use(report.seen, report.own, report.borrowed, report.held)
        else:
            self._hooks.report(report)

    def _lost(self) -> None:
        """The socket closed: the engine is dead or about to be."""
        connection, self._connection = self._connection, None
        if self.state not in {
            EngineState.DRAINING,
            EngineState.SLEEPING,
        }:  # one that sleeps starts when it wakes up
            self.state = EngineState.RESTARTING
        explained = self._hooks.lost("the engine ended unexpectedly")
        if connection is not None:
            connection.host.kill()
            self._dying.add(connection.host)
            self._spawn(self._recover(connection.host, explained))

    async def _recover(self, host: Host, explained: int) -> None:
        """Restart the engine. Deaths with a known cause do not count as failures of the engine."""
        cause = await host.ended()
        self._dying.discard(host)
        self._left()
        logger.error("the engine ended unexpectedly: %s", cause)
        for _ in range(min(explained - 1, len(self._failures))):
            self._failures.pop()
        counts = not explained
        while self.state is EngineState.RESTARTING:
            now = time.monotonic()
            while self._failures and self._failures[0] < now - _WINDOW_SECONDS:
                self._failures.popleft()
            if len(self._failures) >= self._serving.engine_restarts:
                logger.error(
                    "giving up: the engine was started %d times in %d minutes",
                    len(self._failures),
                    _WINDOW_SECONDS // 60,
                )
                self.state = EngineState.FAILED
                self.given_up.set()
                return
            if counts:
                self._failures.append(now)
            counts = True
            await asyncio.sleep(min(_MAX_DELAY, _FIRST_DELAY * 4 ** max(0, len(self._failures) - 1)))
            try:
                ready = await self._open(None)
            except (QuireError, ValueError, OSError, MemoryError) as error:
                logger.error("the engine could not be restarted: %s", error)
                continue
            self._hooks.ready(ready)
            self.restarts += 1
            self.state = EngineState.READY
            logger.warning("the engine was restarted")

    async def _watch(self) -> None:
        """Check the engine several times within the stall timeout."""
        tick = min(_MAX_TICK, self._serving.stall_timeout / 8)
        last = time.monotonic()
        while True:
            await asyncio.sleep(tick)
            now = time.monotonic()
            overslept, last = max(0.0, now - last - 2 * tick), now
            self._hooks.tick(now)
            if self._connection is not None:
                self._check(self._connection, now, overslept)

    def _check(self, connection: EngineConnection, now: float, overslept: float) -> None:
        verdict = self._watchdog.check(
            now,
            working=self._hooks.working(),
            cpu_seconds=self._hooks.used(connection.host.cpu_seconds()),
            overslept=overslept,
        )
        if verdict is Verdict.ASK:
            connection.send(Ping(next(self._numbers)))
        if verdict is not Verdict.STALLED:
            return
        quiet = now - self._watchdog.quiet_since
        if self.state is EngineState.READY:
            logger.error("the engine is stalled: no response for %.1f seconds", quiet)
            self.state = EngineState.STALLED
        hang = self._serving.hang_timeout
        if self.state is EngineState.STALLED and hang and quiet > self._watchdog.limit + hang:
            logger.error("killing the engine: no response for %.1f seconds", quiet)
            connection.host.kill()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
