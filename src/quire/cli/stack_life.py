"""A stack while it is up: its parts start in order, are kept running, and end in the opposite order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time

from quire.cli.stack_parts import StackPart, write_own
from quire.config.stack import StackConfig
from quire.util.http_client import Client, ClientError, target
from quire.util.printable import printable
from quire.util.supervised import Supervised

_WAITING_BYTES = 8 * 2**20  # lines of the log, while nobody reads it
_MORE_SECONDS = 10.0  # to end, beside those that running requests have
_READY = 200


class LogView:
    """Lines of all parts on standard error, each behind the name of its part. Nothing waits for its reader."""

    def __init__(self, names: list[str]) -> None:
        self._width = max(map(len, names))
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._waiting = self._lost = 0  # bytes and lines
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def say(self, name: str, line: str) -> None:
        """Show a line; it is lost if too much waits."""
        text = f"{name:<{self._width}} | {printable(line)}\n"
        if self._lost:
            text = f"{'':<{self._width}} | {self._lost} lines were not read in time\n{text}"
        with self._lock:
            fits = self._waiting + sys.getsizeof(text) <= _WAITING_BYTES
            if fits:
                self._waiting += sys.getsizeof(text)
        if fits:
            self._lines.put(text)
        self._lost = 0 if fits else self._lost + 1

    def close(self, seconds: float = 1.0) -> None:
        """Show what is left, if it is read within so many seconds."""
        self._lines.put(None)
        self._thread.join(seconds)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError):
                sys.stderr.write(line)
                sys.stderr.flush()
            with self._lock:
                self._waiting -= sys.getsizeof(line)


class StackLife:
    """Runs the parts of a stack by their `commands`, until SIGTERM or SIGINT; a second one ends them at once."""

    def __init__(self, config: StackConfig, parts: list[StackPart], commands: dict[str, list[str]]) -> None:
        self._config, self._parts = config, parts
        self._log = LogView([each.name for each in parts])
        self._made = {each.name: self._supervised(each, commands[each.name]) for each in parts}
        self._up = False
        self._asked = 0  # to end, so many times
        self._ending = asyncio.Event()

    def _supervised(self, part: StackPart, command: list[str]) -> Supervised:
        async def ready() -> bool:
            if part.kind == "kv-server":
                _, writer = await asyncio.open_connection(part.host, part.port)
                writer.close()
                return True
            client = Client(target(part.url, insecure=True), connect_timeout=1.0)
            try:
                async with asyncio.timeout(5.0):
                    status, _ = await client.get("/health/ready" if part.kind == "serve" else "/health")
            except (ClientError, TimeoutError):
                return False
            finally:
                await client.close()
            return status == _READY

        return Supervised(part.name, command, ready, self._log.say, self._tell)

    async def run(self) -> int:
        """Start, stay, end. Returns 1 if a part ended before it worked for the first time."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._end)
        tasks: list[asyncio.Task[None]] = []
        failed = False
        try:
            for group in self._groups():
                for each in group:
                    tasks.append(asyncio.create_task(each.run()))
                    tasks[-1].add_done_callback(self._see)
                failed = failed or not await self._settled(group)
                if failed or self._asked:
                    break
            if not failed and not self._asked:
                self._up = True
                self._tell()
                self._log.say(
                    self._parts[-1].name, f"quire: {self._config.name} is up at {self._parts[-1].url}"
                )
                await self._ending.wait()
        finally:
            self._up = False
            await self._down()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            for each in self._made.values():
                if each.state == "failed":
                    self._log.say(
                        each.name, f"quire: {each.name} {each.why} before it worked; its last lines:"
                    )
                    for line in each.last:
                        self._log.say(each.name, line)
            (self._config.state / "status.json").unlink(missing_ok=True)
            self._log.close()
        for error in found:
            if error is not None:
                raise error
        return int(failed)

    def _see(self, task: asyncio.Task[None]) -> None:
        """A part is no longer kept running: by a mistake of this program, all end."""
        if not task.cancelled() and task.exception() is not None:
            self._ending.set()

    def _groups(self) -> list[list[Supervised]]:
        """What starts together: blocks, servers, router."""
        kinds = {kind: [self._made[each.name] for each in self._parts if each.kind == kind]
                 for kind in ("kv-server", "serve", "router")}  # fmt: skip
        return [group for group in kinds.values() if group]

    async def _settled(self, group: list[Supervised]) -> bool:
        """Wait until all of a group are up; false if one is not, and is not to end."""
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
            for each in self._made.values():
                each.kill()

    async def _down(self) -> None:
        """End the parts: first the one that sends requests to others."""
        seconds = {each.name: each.seconds + _MORE_SECONDS for each in self._parts}
        for group in reversed(self._groups()):
            await asyncio.gather(
                *(each.end(0.0 if self._asked > 1 else seconds[each.name]) for each in group)
            )

    def _tell(self) -> None:
        """Write what the stack is doing, for `quire stack status`."""
        parts = []
        for part in self._parts:
            made = self._made[part.name]
            parts.append({
                "name": part.name, "kind": part.kind, "role": part.role, "url": part.url, "state": made.state,
                "pid": made.pid, "restarts": made.restarts, "since": made.since, "why": made.why,
            })  # fmt: skip
        found = {
            "name": self._config.name, "pid": os.getpid(), "up": self._up, "url": self._parts[-1].url,
            "seconds": sum(each.seconds + _MORE_SECONDS for each in self._parts), "parts": parts,
            "written": time.time(),
        }  # fmt: skip
        with contextlib.suppress(OSError):
            write_own(self._config.state / "status.json", json.dumps(found))
