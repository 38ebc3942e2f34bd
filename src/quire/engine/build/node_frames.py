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
from collections.abc import Sequence
from typing import BinaryIO, cast

import numpy as np

from quire import _native
from quire.executor.base import U8
from quire.executor.ranked import MemoryPiece
from quire.records import dataclass

_HEAD = struct.Struct("<HHI")
_RANGE = struct.Struct("<QQ")
_SMALL = 2**16  # bytes that are joined to be sent in one call
MOST_TEXT = 2**21
LOOK_SECONDS = 0.25
SILENT_SECONDS = 3.0


class Said(enum.IntEnum):
    """The kinds of frames."""

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
        self._heart: tuple[socket.socket, _native.WireHeart] | None = None
        self._beats, self._silent = 0, 0.0
        self._frames = cast("BinaryIO", sock.makefile("rb", buffering=_SMALL))

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

    def line(self, seconds: float | None = None) -> bytes:
        """A line before the first frame; empty at the end. Raises TimeoutError after `seconds`."""
        self._sock.settimeout(seconds)
        found = self._frames.readline(MOST_TEXT)
        self._sock.settimeout(None)
        return found

    @property
    def ended(self) -> bool:
        """Whether the other side has ended the connection, before the first frame."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def say_line(self, text: bytes) -> None:
        """Send a line before the first frame."""
        self._sock.sendall(text + b"\n")

    def receive(self, memory: U8) -> NodeFrame | None:
        """The next frame, whose pieces go into `memory`; None when the connection has ended. Raises BadFrameError."""
        head = self._exactly(_HEAD.size)
        if head is None:
            return None
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
            at += got
        return True

    def attach(self, sock: socket.socket) -> None:
        """Show that this side is there, and look at the other one, over a socket of its own; see WireHeart."""
        self._heart = sock, _native.WireHeart(sock.fileno())

    def silent_after(self, seconds: float) -> bool:
        """Whether the other side has been silent for too long, `seconds` after the last call."""
        heart = self._heart
        beats = heart[1].beats if heart else 0
        # This process may have been stopped: only what it could have heard counts.
        self._silent = self._silent + min(seconds, 2 * LOOK_SECONDS) if beats == self._beats else 0.0
        self._beats = beats
        return self._silent > SILENT_SECONDS

    def close(self) -> None:
        """End the connection; whoever receives is told so."""
        heart, self._heart = self._heart, None
        if heart:
            sock, native = heart
            del heart
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            del native  # its thread ends before the number of the socket is another's
            sock.close()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
