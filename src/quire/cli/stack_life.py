"""A stack while it is up: its parts start in order, are kept running, and end in the opposite order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from quire.cli.stack_log import LogView
from quire.cli.stack_parts import HeldPorts, StackFiles, StackPart, lists_of, write_own
from quire.config.stack import StackConfig
from quire.util.http_client import Client, ClientError, target
from quire.util.supervised import PAUSES, Supervised

_MORE_SECONDS = 10.0  # to end, beside those that running requests have
_READY = 200
KINDS = ("kv-server", "serve", "router")  # in the order in which they start
ROUTER = "router"


class StackLife:
    """Runs the parts of a stack, whose `files` are written, until SIGTERM or SIGINT; a second one ends them at once.

    `parts` are all that there may be, `made` those that are kept running; of a table that is scaled, some are not.
    What changes while it is up takes `turn`.
    """

    def __init__(
        self, config: StackConfig, parts: list[StackPart], files: StackFiles, ports: HeldPorts
    ) -> None:
        self.config, self.files, self.ports = config, files, ports
        self.parts = {each.name: each for each in parts}
        self.made: dict[str, Supervised] = {}
        self.turn = asyncio.Lock()
        self.told: dict[str, Any] = {}  # more that `quire stack status` says
        self._log = LogView([each.name for each in parts])
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._error: BaseException | None = None
        self._up = False
        self._asked = 0  # to end, so many times
        self._ending = asyncio.Event()

    async def run(self, hang_up: Callable[[], bool], *beside: Coroutine[Any, Any, None]) -> int:
        """Start, stay, end; what runs `beside` begins once all is up, and is cancelled at the end. `hang_up` is what
        SIGHUP does, and whether that is to end. Returns 1 if a part ended before it worked for the first time."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._end() if hang_up() else None)
        tasks: list[asyncio.Task[None]] = []
        failed = False
        try:
            for kind in KINDS:
                failed = failed or not await self.start(self._first(kind))
                if failed or self._asked:
                    break
            if not failed and not self._asked:
                self._up = True
                self.tell()
                self.say(ROUTER, f"{self.config.name} is up at {self.parts[ROUTER].url}")
                tasks = [asyncio.create_task(each) for each in beside]
                for task in tasks:
                    task.add_done_callback(self._see)
                await self._ending.wait()
        finally:
            self._up = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for each in beside:
                each.close()
            await self._down()
            self._explain()
            (self.config.state / "status.json").unlink(missing_ok=True)
            self._log.close()
        if self._error is not None:
            raise self._error
        return int(failed)

    def _first(self, kind: str) -> list[str]:
        """The parts of a kind that start with the stack."""
        later = self.config.later
        return [each.name for each in self.parts.values() if each.kind == kind and each.name not in later]

    async def start(self, names: Iterable[str]) -> bool:
        """Start parts, and wait until they work; false if one ended before, or all are to end."""
        return await self._settled([self.launch(name) for name in names])

    def launch(self, name: str) -> Supervised:
        """Start a part."""
        part = self.parts[name]

        async def ready() -> bool:
            if part.kind == "kv-server":
                _, writer = await asyncio.open_connection(part.host, part.port)
                writer.close()
                return True
            status, _ = await asked(part.url, "/health/ready" if part.kind == "serve" else "/health")
            return status == _READY

        async def answers() -> bool:
            status, _ = await asked(part.url, "/health", self.config.hung_seconds / 2)
            return status > 0

        made = Supervised(
            name, self.files.commands[name], ready, self._log.say, self.tell,
            None if part.kind == "kv-server" else answers, self.config.hung_seconds,
        )  # fmt: skip
        self.made[name] = made
        task = self._tasks[name] = asyncio.create_task(made.run())
        task.add_done_callback(self._see)
        return made

    async def end(self, names: Iterable[str]) -> None:
        """End parts, each with the time for its running requests, and wait for that."""
        await asyncio.gather(*(self._end_part(name) for name in names if name in self.made))
        self.tell()

    def leave(self, name: str) -> None:
        """End a part, and do not wait for it."""

        async def leaves() -> None:
            try:
                await self._end_part(name)
            finally:
                del self._leaving[name]
                self.tell()

        self._leaving[name] = asyncio.create_task(leaves())

    @property
    def leaving(self) -> Sequence[str]:
        """The parts that end."""
        return [*self._leaving]

    async def left(self) -> None:
        """Wait until no part is on its way out."""
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    async def _end_part(self, name: str) -> None:
        made, task = self.made[name], self._tasks[name]
        await made.end(0.0 if self._asked > 1 else self.parts[name].seconds + _MORE_SECONDS)
        await asyncio.wait([task])
        if self.made.get(name) is made:
            del self.made[name], self._tasks[name]

    def say(self, name: str, line: str) -> None:
        """Show a line of the stack's own about a part."""
        self._log.say(name, f"quire: {line}")

    def write(self, name: str, text: str) -> None:
        """Write a file for the parts. Raises OSError."""
        write_own(self.config.state / name, text)

    def list_servers(self, parts: Iterable[StackPart]) -> None:
        """Let the router and Prometheus know of these parts and of no others. Raises OSError."""
        for name, text in lists_of([*parts]).items():
            self.write(name, text)
        router = self.made.get(ROUTER)
        if router is not None and router.state == "up" and router.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(router.pid, signal.SIGHUP)

    def _see(self, task: asyncio.Task[None]) -> None:
        """A part is no longer kept running: by a mistake of this program, all end."""
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self._ending.set()

    async def _settled(self, group: list[Supervised]) -> bool:
        """Wait until all of a group are up; false if one is not, or all are to end."""
        waits = [asyncio.create_task(each.settled.wait()) for each in group]
        ending = asyncio.create_task(self._ending.wait())
        left = {*waits}
        while left and not ending.done() and not any(each.state == "failed" for each in group):
            done, _ = await asyncio.wait({*left, ending}, return_when=asyncio.FIRST_COMPLETED)
            left -= done
        for task in (*waits, ending):
            task.cancel()
        return not any(each.state == "failed" for each in group)

    def _end(self) -> None:
        self._asked += 1
        self._ending.set()
        if self._asked > 1:
            for each in self.made.values():
                each.kill()

    async def _down(self) -> None:
        """End the parts: first the one that sends requests to others. Those that leave already are waited for."""
        for kind in reversed(KINDS):
            names = [
                name for name in self.made if self.parts[name].kind == kind and name not in self._leaving
            ]
            failed = {name: self.made[name] for name in names if self.made[name].state == "failed"}
            await self.end(names)
            self.made |= failed
        await self.left()

    def _explain(self) -> None:
        """Say why parts could not start."""
        for each in self.made.values():
            if each.state == "failed":
                self.say(each.name, f"{each.name} {each.why} before it worked; its last lines:")
                for line in each.last:
                    self._log.say(each.name, line)

    def tell(self) -> None:
        """Write what the stack is doing, for `quire stack status`."""
        parts = []
        for part in self.parts.values():
            made = self.made.get(part.name)
            parts.append({
                "name": part.name, "kind": part.kind, "role": part.role, "url": part.url,
                "state": "off" if made is None else made.state, "pid": None if made is None else made.pid,
                "restarts": 0 if made is None else made.restarts, "since": None if made is None else made.since,
                "why": "" if made is None else made.why,
            })  # fmt: skip
        found = {
            "name": self.config.name, "pid": os.getpid(), "up": self._up, "url": self.parts[ROUTER].url,
            "seconds": sum(each.seconds + _MORE_SECONDS for each in self.parts.values()), "parts": parts,
            "written": time.time(),
        } | self.told  # fmt: skip
        with contextlib.suppress(OSError):
            self.write("status.json", json.dumps(found))


async def asked(url: str, path: str, seconds: float = 5.0) -> tuple[int, bytes]:
    """The answer of a part; status 0 if there is none in time."""
    client = Client(target(url, insecure=True), connect_timeout=1.0)
    try:
        async with asyncio.timeout(min(seconds, 5.0)):
            return await client.get(path)
    except (ClientError, TimeoutError):
        return 0, b""
    finally:
        await client.close()


FAILED_PAUSE = PAUSES[1]  # seconds after which a part that never worked is started again
