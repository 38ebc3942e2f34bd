"""The protocol between an engine and a server of KV blocks: framed TCP, both sides authenticated by a shared key.

    server   magic, epoch (8), nonce (32)
    client   magic, nonce (32), fingerprint (64), bytes of a block (8), proof (32)
    server   verdict (1), proof (32)
    frames   kind (1), digest (16), group (8), number (8), length (8), sum (16), mac (16); then `length` bytes

Proofs are HMACs of all that was said, with the key and the name of the side. A frame's mac covers its head, its place
in the stream and its direction, with a key of the session; the head has the sum of the content. So nothing can be
changed, left out, repeated or put in by whoever has not the key. What is sent is no secret: blocks are in plain text.
Over a Unix socket both sides then pass an area of memory (worker.shared_area), and contents of blocks go through these.

The sum of a content (worker.content_sums) is keyed with the shared key and the fingerprint, and covers its name: it is
made where the block was computed, stored with it, and checked by the server when it comes and by each engine that reads
it.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, Protocol

from quire.worker.content_sums import ContentSums

MAGIC = b"quire kv 2\n"
NONCE, PROOF = 32, 32
FINGERPRINT = 64
HELLO_SECONDS = 5.0
_HELLO = struct.Struct(f"<{len(MAGIC)}s8s{NONCE}s")
_CLIENT = struct.Struct(f"<{len(MAGIC)}s{NONCE}s{FINGERPRINT}sQ{PROOF}s")
_HEAD = struct.Struct("<B16sQQQ16s")
_MAC = 16
ADMITTED, REFUSED_LAYOUT = 1, 2
LISTED = 4096  # names in an answer to LIST
MOST_METADATA = 2**16  # bytes, of an agent of NIXL
UNANSWERED = 4  # blocks that are sent before the server has answered for the first of them
NAME = struct.Struct("<16sQ")


class Kind(IntEnum):
    """What a frame is. Requests: PUT (a content), GET, DROP, LIST (the names kept after `number`), AREA (contents of
    blocks go through NIXL from now on: metadata, `group` slots at address `number`); the rest are answers."""

    PUT = 1
    GET = 2
    DROP = 3
    LIST = 4
    CONTENT = 5  # of the block that was asked for
    MISSING = 6
    DONE = 7  # with the number of the latest name that it tells
    AREA = 8  # also the answer to one, with those of the server


_OF_BLOCKS = frozenset((Kind.PUT, Kind.CONTENT))


class WireError(OSError):
    """The other side is not what it should be, or said something wrong."""


class OldConnectionError(WireError):
    """A call failed on a connection from before an outage that is over: it says nothing of the server as it is now."""


class Frame(NamedTuple):
    """A frame without its content, of which it has length and sum."""

    kind: Kind
    digest: bytes = bytes(16)
    group: int = 0
    number: int = 0
    length: int = 0
    sum: bytes = bytes(16)


@lru_cache(64)
def sums_with(key: bytes, fingerprint: bytes) -> ContentSums:
    """Check sums of contents, which those alone can make who have the key; a name is NAME.pack(digest, group)."""
    return ContentSums(hmac.digest(key, b"sums" + fingerprint, "sha256"))


class ContentArea(Protocol):
    """Where contents of blocks go past the connection, in order. Both may raise OSError."""

    def put(self, content: bytes | bytearray | memoryview, /) -> None: ...

    def take(self, room: memoryview, /) -> None: ...

    def close(self) -> None: ...


class Peer:
    """One side of an authenticated connection. `most`: bytes of the longest content that may come. `areas`: ours and
    theirs, through which contents of blocks go; None: over the connection."""

    def __init__(self, sock: socket.socket, session: bytes, *, server: bool, most: int) -> None:
        self._sock, self._most = sock, most
        self.areas: tuple[ContentArea, ContentArea] | None = None
        ours, theirs = (b"server", b"client") if server else (b"client", b"server")
        self._keys = hmac.digest(session, ours, "sha256"), hmac.digest(session, theirs, "sha256")
        self._sent = self._read = 0

    def send(self, frame: Frame, content: bytes | memoryview = b"", *, seconds: float) -> None:
        """Send a frame, whose length and sum must be those of the content. Raises OSError, also if it is late."""
        self._sock.settimeout(seconds)
        head = _HEAD.pack(*frame)
        mac = _mac(self._keys[0], self._sent, head)
        self._sent += 1
        if self.areas is not None and frame.kind in _OF_BLOCKS:
            self.areas[0].put(content)
            content = b""
        self._sock.sendall(head + mac)
        if content:
            self._sock.sendall(content)

    def receive(
        self, into: Callable[[Frame], memoryview | None], *, seconds: float, idle: float | None = None
    ) -> Frame:
        """The next frame, which begins within `idle` seconds, if given, and is there `seconds` later. `into` gives room
        for its content, of exactly its length. Raises OSError, WireError for what is not authentic or too long, and
        ConnectionError at the end."""
        head = bytearray(_HEAD.size + _MAC)
        begun = read_some(self._sock, memoryview(head), idle) if idle is not None else 0
        until = time.monotonic() + seconds
        read_into(self._sock, memoryview(head)[begun:], until)
        raw = bytes(head)
        if not hmac.compare_digest(raw[_HEAD.size :], _mac(self._keys[1], self._read, raw[: _HEAD.size])):
            raise WireError("a frame is not authentic")
        self._read += 1
        kind, digest, group, number, length, check = _HEAD.unpack_from(raw)
        try:
            frame = Frame(Kind(kind), digest, group, number, length, check)
        except ValueError:
            raise WireError(f"a frame of the unknown kind {kind}") from None
        if length > self._most:
            raise WireError(f"a content of {length} bytes is over the limit of {self._most}")
        room = into(frame) if length else None
        if length:
            if room is None or len(room) != length:
                raise WireError(f"a content of {length} bytes is of the wrong size")
            if self.areas is not None and frame.kind in _OF_BLOCKS:
                self.areas[1].take(room)
            else:
                read_into(self._sock, room, until)
        return frame

    def close(self) -> None:
        """Give back the areas, and end the connection."""
        self._sock.close()
        for area in self.areas or ():
            area.close()
        self.areas = None


def offer(
    sock: socket.socket, key: bytes, epoch: bytes, admit: Callable[[bytes, int], bool]
) -> tuple[Peer, bytes, int]:
    """The server's part of the beginning; `admit` says whether blocks of a layout may be kept. Returns the peer, its
    fingerprint and the bytes of its blocks. Raises WireError for a client without the key, or of another layout."""
    until = time.monotonic() + HELLO_SECONDS
    hello = _HELLO.pack(MAGIC, epoch, os.urandom(NONCE))
    sock.settimeout(HELLO_SECONDS)
    sock.sendall(hello)
    said = read_exactly(sock, _CLIENT.size, until)
    magic, _, fingerprint, size, proof = _CLIENT.unpack(said)
    told = hello + said[:-PROOF]
    if magic != MAGIC or not hmac.compare_digest(proof, hmac.digest(key, b"client" + told, "sha256")):
        raise WireError("a client without the key")
    verdict = bytes([ADMITTED if admit(fingerprint, size) else REFUSED_LAYOUT])
    sock.sendall(verdict + hmac.digest(key, b"server" + told + verdict, "sha256"))
    if verdict[0] != ADMITTED:
        raise WireError(f"a client whose blocks of {size} bytes are of another layout")
    session = hmac.digest(key, b"session" + told, "sha256")
    return Peer(sock, session, server=True, most=max(size, MOST_METADATA)), fingerprint, size


def ask(sock: socket.socket, key: bytes, fingerprint: bytes, size: int) -> tuple[Peer, bytes]:
    """The client's part. Returns the peer and the epoch of the server. Raises WireError for a server without the key,
    and one that keeps no blocks of this layout."""
    until = time.monotonic() + HELLO_SECONDS
    hello = read_exactly(sock, _HELLO.size, until)
    magic, epoch, _ = _HELLO.unpack(hello)
    if magic != MAGIC:
        raise WireError("it is no server of KV blocks, or of another version")
    said = _CLIENT.pack(MAGIC, os.urandom(NONCE), fingerprint, size, bytes(PROOF))[:-PROOF]
    told = hello + said
    sock.sendall(said + hmac.digest(key, b"client" + told, "sha256"))
    answer = read_exactly(sock, 1 + PROOF, until)
    verdict = answer[:1]
    if not hmac.compare_digest(answer[1:], hmac.digest(key, b"server" + told + verdict, "sha256")):
        raise WireError("it has not the key")
    if verdict[0] != ADMITTED:
        raise WireError(f"it keeps no blocks of {size} bytes of this model")
    most = max(size, LISTED * NAME.size, MOST_METADATA)
    return Peer(sock, hmac.digest(key, b"session" + told, "sha256"), server=False, most=most), epoch


def read_exactly(sock: socket.socket, count: int, until: float) -> bytes:
    """So many bytes, by a time of time.monotonic(). Raises OSError, and ConnectionError at the end."""
    found = bytearray(count)
    read_into(sock, memoryview(found), until)
    return bytes(found)


def read_into(sock: socket.socket, room: memoryview, until: float) -> None:
    """Fill the room, by a time of time.monotonic(), however slowly bytes come. Raises OSError, and ConnectionError at
    the end."""
    while room:
        room = room[read_some(sock, room, until - time.monotonic()) :]


def read_some(sock: socket.socket, room: memoryview, seconds: float) -> int:
    """Read at least a byte. Raises OSError, and ConnectionError at the end."""
    sock.settimeout(max(0.001, seconds))
    got = sock.recv_into(room)
    if not got:
        raise ConnectionError("the connection has ended")
    return got


def _mac(key: bytes, number: int, head: bytes) -> bytes:
    return blake2b(number.to_bytes(8, "little") + head, digest_size=_MAC, key=key).digest()
