"""A `quire serve` of its own: a process, its engine's process, and what they hold."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.server import GUARD, Reply, request_bytes
from quire.server.exposition import CACHE_SECONDS

SMALL = ["--max-model-len", "65000", "--threads", "1", "--memory", "700MiB"]


class Process:
    """A server that has announced itself."""

    def __init__(
        self,
        folder: Path | None,
        *options: str,
        files: int | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        named = [] if folder is None else [str(folder)]
        limit = ["prlimit", f"--nofile={files}"] if files is not None else []
        self.process = subprocess.Popen(
            [*limit, sys.executable, "-m", "quire.cli.main", "serve", *named, *SMALL, *options],
            stderr=subprocess.PIPE, text=True, preexec_fn=before,  # noqa: PLW1509
        )  # fmt: skip
        self.lines: list[str] = []
        self._measured = 0.0  # when metrics were asked for last
        assert self.process.stderr is not None
        with self._guarded():
            for line in self.process.stderr:
                self.lines.append(line.rstrip())
                if line.startswith("quire: serving "):
                    break
            else:
                pytest.fail("\n".join(self.lines))

    def said(self, text: str) -> None:
        """Wait for a line of the log that has a text."""
        assert self.process.stderr is not None
        with self._guarded():
            while text not in (line := self.process.stderr.readline()):
                assert line, f"ended without {text!r}"

    def ended(self) -> tuple[int, str]:
        """Wait for its end; returns the exit status and the log since the last call."""
        assert self.process.stderr is not None
        with self._guarded():
            rest = self.process.stderr.read()
            return self.process.wait(), rest

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Waiting in vain ends with the process."""
        guard = threading.Timer(GUARD, self.process.kill)
        guard.start()
        try:
            yield
        finally:
            guard.cancel()

    @property
    def port(self) -> int:
        found = re.search(r":(\d+)$", self.lines[-1])
        assert found, self.lines
        return int(found[1])

    @property
    def engine(self) -> int:
        """Process id of the engine that runs now."""
        (pid,) = children(self.process.pid)
        return pid

    @property
    def compiler(self) -> int:
        """Process id of the process that compiles grammars, which a thread of the server has started."""
        (pid,) = {*children(self.process.pid, "*")} - {self.engine}
        return pid

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait; returns the exit status and the log."""
        self.process.send_signal(number)
        return self.ended()

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GUARD)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def ready(self) -> bool:
        """What the readiness probe says."""
        return self.request("GET", "/health/ready").status == 200

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, which are not those of the last call."""
        time.sleep(max(0.0, self._measured + 1.1 * CACHE_SECONDS - time.monotonic()))
        lines = [line.rpartition(" ") for line in self.request("GET", "/metrics").text.splitlines()]
        self._measured = time.monotonic()
        found = [float(value) for head, _, value in lines if head.partition("{")[0] == name]
        assert found, name
        return sum(found)

    def ask(self, tokens: int, **fields: Any) -> socket.socket:
        """A connection with a request for a streamed answer."""
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "ignore_eos": True}
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=GUARD)
        asked = body | {"stream": True} | fields
        sock.sendall(request_bytes("/v1/chat/completions", asked, headers="connection: close\r\n"))
        return sock

    def stream(self, tokens: int, **fields: Any) -> socket.socket:
        """A connection whose streamed answer has begun."""
        sock = self.ask(tokens, **fields)
        assert sock.recv(10)
        return sock

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Its engine is stopped meanwhile, so requests are not answered."""
        engine = self.engine
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)


@contextlib.contextmanager
def running(folder: Path | None, *options: str, files: int | None = None) -> Iterator[Process]:
    """A server on a free port, unless told otherwise, that may have so many open `files`; it is killed at the end if
    it is still there.
    """
    process = Process(folder, *(() if "--uds" in options else ("--port", "0")), *options, files=files)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
            process.process.communicate()


def until(true: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    end = time.monotonic() + GUARD
    while not true():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.02)


def children(pid: int, thread: int | str | None = None) -> list[int]:
    """Process ids of the children that a thread of a process has started: the first one, or "*" for all."""
    listed = [file.read_text() for file in Path(f"/proc/{pid}/task").glob(f"{thread or pid}/children")]
    return [int(child) for child in " ".join(listed).split()]


def gone(pid: int) -> bool:
    """The process does not exist, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def descriptors(pid: int) -> int:
    """Open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
