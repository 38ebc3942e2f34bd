"""What nodes say to each other over a connection: frames of numbers, and of bytes for the memory that ranks share.

A frame is a head (kind, pieces, bytes of its text), the text, a table of pieces, and their bytes. A piece is a range of
the memory, which has the same layout on all nodes. Nothing in a frame is code or is unpickled; a piece that is not in
the memory ends the connection. Numbers are in the order of x86 and Arm, little-endian.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO, cast

import numpy as np

from quire.executor.base import U8
from quire.executor.ranked import MemoryPiece
from quire.records import dataclass

_HEAD = struct.Struct("<HHI")
_RANGE = struct.Struct("<QQ")
_SMALL = 2**16  # bytes that are joined to be sent in one call
MOST_TEXT = 2**28  # an adapter's matrix
BEAT_SECONDS = 0.25
SILENT_SECONDS = 3.0


class Said(enum.IntEnum):
    """The kinds of frames."""

    BEAT = 0
    COMMAND = 1  # to a node: ten numbers
    LEFT = 2  # to a node: what ranks of another one leave for ranks here; the first of those and how many
    DONE = 3  # from a node: its ranks are done with the command; see Done
    SLOTS = 4  # to a node: bytes for the socket of a rank, about adapters; its number
    HEARD = 5  # from a node: a rank's number, and the line of JSON that it says
    LOST = 6  # from a node: why it ends


@dataclass(frozen=True, slots=True)
class NodeFrame:
    """What has arrived; its pieces are in the memory already."""

    kind: Said
    text: bytes
    pieces: Sequence[tuple[int, int]]  # where, and how many bytes


class BadFrameError(OSError):
    """Bytes that are no frame: the other side is another version, or broken."""


class NodeConnection:
    """A connection to another node, whose secret was proved. Threads may send at the same time; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._sending = sock, threading.Lock()
        self._frames = cast("BinaryIO", sock.makefile("rb", buffering=_SMALL))
        self.heard = time.monotonic()  # when something of the other side arrived last
        self._sent = 0.0

    @property
    def own_address(self) -> str:
        """This side's address."""
        return str(self._sock.getsockname()[0])

    def send(self, kind: Said, text: bytes = b"", pieces: Sequence[MemoryPiece] = ()) -> None:
        """Raises OSError when the connection has ended."""
        parts: list[bytes | memoryview] = [_HEAD.pack(kind, len(pieces), len(text)), text]
        parts += [_RANGE.pack(at, content.nbytes) for at, content in pieces]
        contents = [content.data.cast("B") for _, content in pieces if content.nbytes]
        with self._sending:
            self._sent = time.monotonic()
            if sum(map(len, contents)) < _SMALL:
                self._sock.sendall(b"".join([*parts, *contents]))
                return
            self._sock.sendall(b"".join(parts))
            for content in contents:
                self._sock.sendall(content)

    def tell(self, kind: Said, text: bytes) -> None:
        """Send at the end, if the other side still takes it."""
        with contextlib.suppress(OSError):
            if self._sending.acquire(timeout=1.0):
                try:
                    self._sock.settimeout(1.0)
                    self._sock.sendall(_HEAD.pack(kind, 0, len(text)) + text)
                finally:
                    self._sending.release()

    def beat(self) -> None:
        """Show that this side is there, unless something is being sent, or was a moment ago."""
        if time.monotonic() < self._sent + BEAT_SECONDS or not self._sending.acquire(blocking=False):
            return
        try:
            beat = _HEAD.pack(Said.BEAT, 0, 0)
            sent = self._sock.send(beat, socket.MSG_DONTWAIT)
            self._sent = time.monotonic()
            self._sock.sendall(beat[sent:])
        except BlockingIOError:  # the other side takes nothing, and will be silent
            pass
        finally:
            self._sending.release()

    @property
    def silent(self) -> bool:
        """Whether nothing has arrived for too long."""
        return time.monotonic() > self.heard + SILENT_SECONDS

    def line(self) -> bytes:
        """A line before the first frame; empty at the end."""
        return self._frames.readline(MOST_TEXT)

    def say_line(self, text: bytes) -> None:
        """Send a line before the first frame."""
        self._sock.sendall(text + b"\n")

    def receive(self, memory: U8) -> NodeFrame | None:
        """The next frame that is no beat, whose pieces go into `memory`; None when the connection has ended. Raises
        BadFrameError."""
        while True:
            head = self._exactly(_HEAD.size)
            if head is None:
                return None
            self.heard = time.monotonic()
            number, pieces, length = _HEAD.unpack(head)
            if number not in Said.__members__.values() or length > MOST_TEXT:
                raise BadFrameError(f"a frame of kind {number} with {length} bytes")
            text, table = self._exactly(length), self._exactly(pieces * _RANGE.size)
            if text is None or table is None:
                return None
            places = [(at, size) for at, size in _RANGE.iter_unpack(table)]
            for at, size in places:
                if at > len(memory) or size > len(memory) - at:
                    raise BadFrameError(f"a piece of {size} bytes at {at} of {len(memory)}")
                if not self._into(memory[at : at + size]):
                    return None
            if number != Said.BEAT:
                return NodeFrame(Said(number), text, places)

    def _exactly(self, size: int) -> bytes | None:
        found = bytearray(size)
        return bytes(found) if self._into(np.frombuffer(found, np.uint8)) else None

    def _into(self, to: U8) -> bool:
        view, at = to.data.cast("B") if len(to) else memoryview(b""), 0
        while at < len(view):
            try:
                got = self._frames.readinto(view[at:])  # type: ignore[attr-defined]  # of a buffered reader
            except OSError:
                return False
            if not got:
                return False
            self.heard = time.monotonic()
            at += got
        return True

    def close(self) -> None:
        """End the connection; whoever receives is told so."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
