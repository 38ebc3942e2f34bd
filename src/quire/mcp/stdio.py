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
from functools import partial

from quire.mcp.session import Cancellation, Incoming, McpError, Message, read_message

# Other variables may hold keys, which stay here.
_INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
_GRACE_SECONDS = 1.0
_WAITING_MESSAGES = 256
_LOOK_SECONDS = 0.1


class _Inbox:
    """What has come for one request."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Incoming] = queue.Queue(_WAITING_MESSAGES)
        self.failure: McpError | None = None


class StdioTransport:
    """Starts `command` with the environment `env` and little else of this process's own.

    Its messages may have `max_bytes`. They are read only while a request waits for one: a server that talks to nobody
    blocks, and costs nothing.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], cwd: str | None, max_bytes: int
    ) -> None:
        self._name, self._max_bytes = name, max_bytes
        inherited = {key: os.environ[key] for key in _INHERITED if key in os.environ}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=inherited | dict(env), cwd=cwd, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:  # ValueError: of a name in `env`
            raise McpError(f"MCP server {name!r} did not start: {error}", lost=True) from None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._changed = threading.Condition()
        self._inboxes: dict[object, _Inbox] = {}  # by the id of the request
        self._failure: McpError | None = None
        self._closing = False
        self._writing = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"mcp-{name}", daemon=True)
        self._reader.start()

    @property
    def broken(self) -> bool:
        """Whether the process has ended, or has sent what cannot be read."""
        return self._failure is not None or self._process.poll() is not None

    def exchange(self, message: Message, deadline: float, stop: Cancellation, /) -> Iterator[Incoming]:
        number, inbox = message["id"], _Inbox()
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._inboxes[number] = inbox
            self._changed.notify_all()
        stop.watch(
            partial(self._fail, inbox, McpError(f"MCP server {self._name!r}: the request was cancelled"))
        )
        try:
            self.notify(message, deadline)
            while True:
                yield self._next(inbox, deadline)
        finally:
            with self._changed:
                del self._inboxes[number]

    def notify(self, message: Message, deadline: float, /) -> None:
        assert self._process.stdin is not None
        pipe, data = self._process.stdin.fileno(), json.dumps(message).encode() + b"\n"
        if not self._writing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            whole = len(data)
            while data:
                left = max(0.0, deadline - time.monotonic())
                if not select.select((), (pipe,), (), left)[1]:
                    if len(data) < whole:
                        self._end("does not read its input")
                    raise TimeoutError
                try:
                    data = data[os.write(pipe, data) :]
                except BlockingIOError:
                    continue
                except OSError:
                    raise McpError(f"MCP server {self._name!r} has ended", lost=True) from None
        finally:
            self._writing.release()

    def agreed(self, version: str, /) -> None:
        """Nothing changes."""

    def close(self) -> None:
        """Close its input, then end it and what it has started."""
        process = self._process
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        with contextlib.suppress(OSError), self._writing:
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
        self._reader.join(_GRACE_SECONDS)
        if not self._reader.is_alive() and process.stdout is not None:
            process.stdout.close()

    def _next(self, inbox: _Inbox, deadline: float) -> Incoming:
        """The next message for a request; its failure comes behind what has arrived."""
        while True:
            try:
                return inbox.messages.get_nowait()
            except queue.Empty:
                pass
            with self._changed:
                if not inbox.messages.empty():
                    continue
                if inbox.failure is not None:
                    raise inbox.failure
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError

    def _read(self) -> None:
        """Give every line of the server to a request; runs in a thread."""
        assert self._process.stdout is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inboxes or self._closing)
            line = self._process.stdout.readline(self._max_bytes + 1)
            if not line:
                self._end("has ended")
                return
            if len(line) > self._max_bytes:
                self._end(f"sent a message of more than {self._max_bytes} bytes")
                return
            if not line.strip():
                continue
            try:
                message = read_message(self._name, line)
            except McpError as error:
                self._end_with(error)
                return
            self._deliver(message)

    def _deliver(self, message: Incoming) -> None:
        """Give a message to its request, what answers none to the oldest; dropped if nobody waits any more."""
        while True:
            with self._changed:
                inbox = self._inboxes.get(message.id) if message.method is None else None
                if message.method is not None:
                    inbox = next(iter(self._inboxes.values()), None)
                if inbox is None or self._closing:
                    return
                with contextlib.suppress(queue.Full):
                    inbox.messages.put_nowait(message)
                    self._changed.notify_all()
                    return
            time.sleep(_LOOK_SECONDS)  # its reader is busy

    def _fail(self, inbox: _Inbox, error: McpError) -> None:
        with self._changed:
            inbox.failure = inbox.failure or error
            self._changed.notify_all()

    def _end(self, reason: str) -> None:
        self._end_with(McpError(f"MCP server {self._name!r} {reason}", lost=True))

    def _end_with(self, error: McpError) -> None:
        """Fail all requests, and those to come."""
        with self._changed:
            self._failure = self._failure or error
            for inbox in self._inboxes.values():
                inbox.failure = inbox.failure or self._failure
            self._changed.notify_all()
