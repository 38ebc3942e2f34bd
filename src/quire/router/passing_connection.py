"""Connections to servers whose chunks are passed on as they come, with their framing (RFC 9112, section 7.1).

A stream has a chunk for each event, and its client gets the same chunks. A read that is nothing but whole chunks need
not be taken apart and framed again, which takes longer than all else that is done with an event. What else is read is
for the parser, which knows where a chunk has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from quire.util.http_client import ClientConnection

_SIZE = re.compile(rb"([1-9a-f][0-9a-f]{0,7})\r\n")  # the first line of a chunk, as most servers write it
_NO_HEAD = b"\n"  # how no chunk begins
_USUAL = 2048  # bytes: more than a chunk with an event has


@cache
def _head(size: int) -> bytes:
    """The first line of a chunk that has so many bytes with its framing."""
    found = (b"%x\r\n" % length for length in range(max(size - 8, 1), size))
    return next((head for head in found if len(head) + int(head, 16) + 2 == size), _NO_HEAD)


def is_one_chunk(data: bytes) -> bool:
    """Whether data is a whole chunk of usual size and form."""
    return len(data) < _USUAL and data.startswith(_head(len(data))) and data.endswith(b"\r\n")


def framed(data: bytes) -> bytes:
    """A chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def payload_of(data: bytes) -> bytes | None:
    """What whole chunks contain, without their framing; None if data is anything else, or framed in another form."""
    found, at = list[bytes](), 0
    while at < len(data):
        line = _SIZE.match(data, at)
        if line is None:
            return None
        at = line.end() + int(line[1], 16)
        found.append(data[line.end() : at])
        if not data.startswith(b"\r\n", at):
            return None
        at += 2
    return b"".join(found)


class PassingConnection(ClientConnection):
    """A connection on which what follows a whole chunk goes to `passes`, if that is set while an answer comes: true if
    it has taken it, which it may do with whole chunks alone."""

    passes: Callable[[bytes], bool] | None
    _between: bool  # the parser is at the end of a chunk

    def data_received(self, data: bytes) -> None:
        if self.passes is None or not self._between or not self.passes(data):
            super().data_received(data)
            if not data.endswith(b"\r\n"):
                self._between = False  # within a chunk, or its first line

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.passes = None

    def _reset(self) -> None:
        super()._reset()
        self.passes, self._between = None, False
