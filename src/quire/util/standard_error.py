"""Write to standard error without blocking forever if its reader has stopped."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time

from quire.util.printable import printable_lines

_CHUNK = 4096  # PIPE_BUF: a pipe that poll reports as writable accepts this much at once
_SLICE = 0.1  # seconds until `end` is noticed
PATIENCE = 1.0  # seconds in which the reader must read something when a process ends


def say(text: str) -> None:
    """Print escaped lines; give up if they are not read within PATIENCE seconds."""
    writer = Writer()
    writer.end(PATIENCE)
    writer.write(f"{printable_lines(text)}\n")


class Writer:
    """A stream to standard error that can give up. Write from one thread, `end` from any."""

    def __init__(self) -> None:
        self._deadline = float("inf")
        try:
            self._fd = sys.stderr.fileno()
        except (OSError, ValueError, AttributeError):  # replaced by an object that is not a file
            self._fd = -1

    def end(self, seconds: float) -> None:
        """Drop text that is not read within this many seconds from now."""
        self._deadline = time.monotonic() + seconds

    def write(self, text: str) -> None:
        """Write text, or as much as is read in time; nothing if the stream is closed."""
        if self._fd < 0:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
                sys.stderr.write(text)
            return
        data = text.encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            while data and self._writable():
                data = data[os.write(self._fd, data[:_CHUNK]) :]

    def flush(self) -> None:
        """Does nothing: there is no buffer."""

    def _writable(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while True:
            left = self._deadline - time.monotonic()
            if poll.poll(max(0, min(_SLICE, left)) * 1000):
                return True
            if left <= 0:
                return False
