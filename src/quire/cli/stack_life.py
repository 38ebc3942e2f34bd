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

from quire.cli.stack_parts import StackPart, write_whole
from quire.config.stack import StackConfig
from quire.util.http_client import Client, ClientError, target
from quire.util.printable import printable
from quire.util.supervised import Supervised

_WAITING_LINES = 10_000  # of the log, while nobody reads it
_MORE_SECONDS = 10.0  # to end, beside those that running requests have
_LOADING = 503


class LogView:
    """Lines of all parts on standard error, each behind the name of its part. Nothing waits for its reader."""

    def __init__(self, names: list[str]) -> None:
        self._width = max(map(len, names))
        self._lines: queue.Queue[str | None] = queue.Queue(_WAITING_LINES)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def say(self, name: str, line: str) -> None:
        """Show a line; it is lost if too many wait."""
        if self._lost and not self._lines.full():
            self._lines.put(f"{'':<{self._width}} | {self._lost} lines were not read in time\n")
            self._lost = 0
        try:
            self._lines.put_nowait(f"{name:<{self._width}} | {printable(line)}\n")
        except queue.Full:
            self._lost += 1

    def close(self, seconds: float = 1.0) -> None:
        """Show what is left, if it is read within so many seconds."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=seconds)
        self._thread.join(seconds)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError):
                sys.stderr.write(line)
                sys.stderr.flush()


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
            return status != _LOADING

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
                tasks += [asyncio.create_task(each.run()) for each in group]
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
            await asyncio.gather(*tasks)
            for each in self._made.values():
                if each.state == "failed":
                    self._log.say(
                        each.name, f"quire: {each.name} {each.why} before it worked; its last lines:"
                    )
                    for line in each.last:
                        self._log.say(each.name, line)
            (self._config.state / "status.json").unlink(missing_ok=True)
            self._log.close()
        return int(failed)

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
            write_whole(self._config.state / "status.json", json.dumps(found))
