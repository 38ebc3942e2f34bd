"""Writing to standard error without waiting for ever: what reads it may have stopped."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time

from quire.util.printable import printable_lines

_CHUNK = 4096  # PIPE_BUF: a pipe that poll calls writable takes so much at once
_SLICE = 0.1  # seconds until `end` is noticed
PATIENCE = 1.0  # seconds in which a reader must take something when a process ends


def say(text: str) -> None:
    """Print a line or several, escaped, unless they are not taken within PATIENCE seconds."""
    writer = Writer()
    writer.end(PATIENCE)
    writer.write(f"{printable_lines(text)}\n")


class Writer:
    """A stream to standard error that can be told to give up. Write from one thread, `end` from any."""

    def __init__(self) -> None:
        self._deadline = float("inf")
        try:
            self._fd = sys.stderr.fileno()
        except (OSError, ValueError, AttributeError):  # replaced by something that is no file
            self._fd = -1

    def end(self, seconds: float) -> None:
        """Drop what is not taken within so many seconds from now on."""
        self._deadline = time.monotonic() + seconds

    def write(self, text: str) -> None:
        """Write text, or as much of it as is taken in time; nothing when the stream is closed."""
        if self._fd < 0:
            sys.stderr.write(text)
            return
        data = text.encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            while data and self._writable():
                data = data[os.write(self._fd, data[:_CHUNK]) :]

    def flush(self) -> None:
        """Nothing is held back."""

    def _writable(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while True:
            left = self._deadline - time.monotonic()
            if poll.poll(max(0, min(_SLICE, left)) * 1000):
                return True
            if left <= 0:
                return False
