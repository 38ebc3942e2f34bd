"""Split streams into events: server-sent events (WHATWG HTML, 9.2) and JSON lines."""

from __future__ import annotations

from typing import Protocol

MAX_EVENT_BYTES = 16 << 20


class StreamError(Exception):
    """An invalid stream. The message is one line."""


class Decoder(Protocol):
    """Takes bytes in any pieces and returns whole events."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events completed by `data`. Raises StreamError for one that is too long."""


class SseDecoder:
    """The data of server-sent events. Other fields and comments are skipped; lines of one event are joined."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        events: list[bytes] = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")  # noqa: PLW2901
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        if len(self._rest) + sum(len(part) for part in self._data) > MAX_EVENT_BYTES:
            raise StreamError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events


class LineDecoder:
    """JSON lines; empty lines are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamError(f"a line of more than {MAX_EVENT_BYTES} bytes")
        return [line for line in lines if line.strip()]
