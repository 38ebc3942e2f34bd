"""Where an engine runs: in its own process, or in a thread of this one. Both communicate over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from quire.engine.host.spawn import Spawned, socket_pair
from quire.util.printable import printable

_STDERR_LINES = 20
_STDERR_LINE_BYTES = 2000
_POLL_SECONDS = 0.005


class Host(Protocol):
    """One life of an engine."""

    async def start(self) -> socket.socket:
        """Start it; returns our end of the socket, which the caller owns."""

    async def ended(self) -> str:
        """Wait for its end; returns how it ended, for the log."""

    def kill(self) -> None:
        """End it now, where possible."""

    def cpu_seconds(self) -> float | None:
        """CPU time used so far; None if unknown."""

    @property
    def pid(self) -> int | None:
        """Its process id; None for a thread of this process."""


class ProcessHost:
    """An engine process: a fresh interpreter, never a fork of this one.

    A thread of ours forwards its stderr, keeps the last lines, and waits for its exit. `spawned` is a process started
    earlier; the first start uses it. `cores`: see engine/host/process.
    """

    module = "quire.engine.host.process"

    def __init__(self, spawned: Spawned | None = None, cores: str = "") -> None:
        self._spawned, self._cores = spawned, cores
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: deque[bytes] = deque(maxlen=_STDERR_LINES)
        self._exit: asyncio.Future[int] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        spawned, self._spawned = self._spawned or Spawned(self.module, self._cores), None
        self._process, ours = spawned.take()
        try:
            threading.Thread(
                target=self._follow, args=(loop, self._exit), name="quire-engine-stderr", daemon=True
            ).start()
        except RuntimeError:  # no thread left to wait for its exit
            ours.close()
            self._process.kill()
            self._process.wait()
            self._process = None
            raise
        return ours

    async def ended(self) -> str:
        if self._process is None or self._exit is None:
            return "it did not start"
        status = await asyncio.shield(self._exit)
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        last = b"\n".join(self._lines).decode("utf-8", "replace").strip()
        return f"{how}; last on stderr:\n{last}" if last else how

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # does nothing after the process was waited for

    def cpu_seconds(self) -> float | None:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return None
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _follow(self, loop: asyncio.AbstractEventLoop, exit_: asyncio.Future[int]) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        partial = b""
        with self._process.stderr as pipe:
            while data := pipe.read(2**16):
                with contextlib.suppress(OSError, ValueError):  # our stderr may be closed: keep serving
                    sys.stderr.write("\n".join(map(printable, data.decode("utf-8", "replace").split("\n"))))
                    sys.stderr.flush()
                *lines, partial = (partial + data).split(b"\n")
                self._lines.extend([line[:_STDERR_LINE_BYTES] for line in lines])
                partial = partial[:_STDERR_LINE_BYTES]
        if partial:
            self._lines.append(partial)
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(_set_once, exit_, status)


class ThreadHost:
    """An engine in a thread, for tests and small uses: the same loop over the same socket."""

    pid = None

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self._reason = ""

    async def start(self) -> socket.socket:
        ours, theirs = socket_pair()
        self._socket = ours
        from quire.engine.host.process import (
            serve,  # the server's own process does not need the engine's modules
        )

        self._thread = threading.Thread(
            target=serve, args=(theirs, self._lose), name="quire-engine", daemon=True
        )
        self._thread.start()
        return ours

    async def ended(self) -> str:
        while (
            self._thread is not None and self._thread.is_alive()
        ):  # joining would block a thread of ours while it hangs
            await asyncio.sleep(_POLL_SECONDS)
        return f"its thread ended: {self._reason}" if self._reason else "its thread ended"

    def kill(self) -> None:
        """A thread cannot be killed: it ends after its current step, because the socket is closed."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def cpu_seconds(self) -> float | None:
        return None

    def _lose(self, reason: str) -> None:
        """A rank or a replica that it needs has left."""
        self._reason = reason
        self.kill()


def host_factory(*, in_process: bool, spawned: Spawned | None = None, cores: str = "") -> Callable[[], Host]:
    """A factory of hosts, one per start of the engine; the first one uses the process `spawned`. `cores` is for
    processes: see engine/host/process.
    """
    if in_process:
        return ThreadHost
    waiting = [spawned] if spawned is not None else []
    return lambda: ProcessHost(waiting.pop() if waiting else None, cores)


def _set_once(future: asyncio.Future[int], status: int) -> None:
    if not future.done():
        future.set_result(status)
