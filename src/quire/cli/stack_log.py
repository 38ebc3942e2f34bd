"""The logs of all parts of a stack as one."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading

from quire.util.printable import printable

_WAITING_BYTES = 8 * 2**20  # lines of the log, while nobody reads it


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
