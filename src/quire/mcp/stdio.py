"""A tool server that is started as a child process and speaks over its standard input and output."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from quire.mcp.session import MAX_MESSAGE_BYTES, McpError, Message

# Other variables may hold keys, which stay here.
_INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
_GRACE_SECONDS = 1.0
_WAITING_MESSAGES = 256


class StdioTransport:
    """Starts `command` with the environment `env` and little else of this process's own."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
        self._name = name
        inherited = {key: os.environ[key] for key in _INHERITED if key in os.environ}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=inherited | dict(env), cwd=cwd, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:  # ValueError: of a name in `env`
            raise McpError(f"MCP server {name!r} did not start: {error}") from None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._messages: queue.Queue[Message | McpError] = queue.Queue(_WAITING_MESSAGES)
        self._reader = threading.Thread(target=self._read, name=f"mcp-{name}", daemon=True)
        self._reader.start()

    def exchange(self, message: Message, deadline: float, /) -> Iterator[Message]:
        self.notify(message, deadline)
        while True:
            try:
                found = self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if isinstance(found, McpError):
                self._messages.put(found)  # for the next caller, too
                raise found
            yield found

    def notify(self, message: Message, deadline: float, /) -> None:
        assert self._process.stdin is not None
        pipe, data = self._process.stdin.fileno(), json.dumps(message).encode() + b"\n"
        while data:
            left = max(0.0, deadline - time.monotonic())
            if not select.select((), (pipe,), (), left)[1]:
                raise TimeoutError  # it does not read
            try:
                data = data[os.write(pipe, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise McpError(f"MCP server {self._name!r} has ended") from None

    def agreed(self, version: str, /) -> None:
        """Nothing changes."""

    def close(self) -> None:
        """Close its input, then end it and what it has started."""
        process = self._process
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        for sign in (None, signal.SIGTERM, signal.SIGKILL):
            if sign is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # children that it left behind
        end = time.monotonic() + _GRACE_SECONDS
        while self._reader.is_alive() and time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                self._messages.get(timeout=0.05)  # it waits for a place

    def _read(self) -> None:
        """Put every line of the server into the queue; runs in a thread."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(MAX_MESSAGE_BYTES + 1):
            if len(line) > MAX_MESSAGE_BYTES:
                self._end(f"sent a message of more than {MAX_MESSAGE_BYTES} bytes")
                return
            if not line.strip():
                continue
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self._end(f"sent a line that is not a JSON object: {line[:80]!r}")
                return
            self._messages.put(message)
        self._end("has ended")

    def _end(self, reason: str) -> None:
        self._messages.put(McpError(f"MCP server {self._name!r} {reason}"))
