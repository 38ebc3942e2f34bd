"""A server of KV blocks for many engines, in memory: what `quire kv-server` runs.

A connection is of one layout, the fingerprint and size of blocks that its engine has proved to know the key with, and
sees blocks of no other. All contents together, and those that are coming, have one bound; the block used longest ago
makes room. Memory that a block gives up is the room of the next one: new memory costs ten times as much as to fill it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from operator import itemgetter

from quire.core.tier import Name
from quire.worker.content_sums import SUM_BYTES, ContentSums
from quire.worker.kv_wire import (
    HELLO_SECONDS,
    LISTED,
    NAME,
    UNANSWERED,
    Frame,
    Kind,
    Peer,
    WireError,
    offer,
    sums_with,
)
from quire.worker.nixl_area import NixlArea
from quire.worker.shared_area import pass_area, passed_area

MOST_CONNECTIONS = 64
MOST_AGENTS = 12  # of NIXL, three for each engine
MOST_LAYOUTS = 64
ENTRY_BYTES = 1024  # of a block, besides its content
_IDLE_SECONDS = 60.0  # an engine asks every two
_FRAME_SECONDS = 20.0

_Key = tuple[bytes, bytes, int]  # fingerprint, digest, group


class _Layout:
    """The blocks of a fingerprint: their size, and the order in which they came."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks = 0
        self.log: list[tuple[int, Name]] = []


class ShelvedBlock:
    """A content and its check sum; `order`: the how many-th to come. So many connections are being sent it now."""

    __slots__ = ("content", "lent", "order", "sum")

    def __init__(self, order: int, check: bytes, content: bytearray) -> None:
        self.order, self.sum, self.content = order, check, content
        self.lent = 0


class BlockShelf:
    """Contents by fingerprint and name, in at most `size` bytes. Calls may come from different threads."""

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0  # bytes, with those of contents that are coming
        self.stored = self.served = self.evicted = 0
        self._lock = threading.Lock()
        self._order = 0
        self._found: OrderedDict[_Key, ShelvedBlock] = OrderedDict()  # used longest ago first
        self._layouts: OrderedDict[bytes, _Layout] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def largest(self) -> int:
        """Bytes of the largest content that may come."""
        return self.size // 4

    def admit(self, fingerprint: bytes, size: int) -> bool:
        """Whether blocks of a layout may be kept: one fingerprint has one size."""
        with self._lock:
            found = self._layouts.get(fingerprint)
            if found is not None:
                return found.size == size
            if not 0 < size <= self.largest:
                return False
            if len(self._layouts) >= MOST_LAYOUTS:
                empty = next((key for key, layout in self._layouts.items() if not layout.blocks), None)
                if empty is None:
                    return False
                del self._layouts[empty]
            self._layouts[fingerprint] = _Layout(size)
            return True

    def reserve(self, length: int) -> bytearray:
        """Make room for a content that comes. Raises WireError."""
        room = None
        with self._lock:
            while self.used + length + ENTRY_BYTES > self.size and self._found:
                gone = self._remove(next(iter(self._found)))
                self.evicted += 1
                if not gone.lent and len(gone.content) == length:
                    room = gone.content
            if self.used + length + ENTRY_BYTES > self.size:
                raise WireError("too many contents come at once")
            self.used += length + ENTRY_BYTES
        return bytearray(length) if room is None else room

    def release(self, length: int) -> None:
        """A content for which there was room does not come, or is not kept."""
        with self._lock:
            self.used -= length + ENTRY_BYTES

    def put(self, fingerprint: bytes, name: Name, check: bytes, content: bytearray) -> None:
        """Keep a content for which room was made."""
        with self._lock:
            layout, key = self._layouts.get(fingerprint), (fingerprint, *name)
            if layout is None or key in self._found:
                self.used -= len(content) + ENTRY_BYTES
                return
            self._order += 1
            self._found[key] = ShelvedBlock(self._order, check, content)
            layout.blocks += 1
            layout.log.append((self._order, name))
            self.stored += 1
            if len(layout.log) > 2 * layout.blocks + 64:
                layout.log = [each for each in layout.log if self._is_there(fingerprint, each)]

    @contextlib.contextmanager
    def lent(self, fingerprint: bytes, name: Name) -> Iterator[ShelvedBlock | None]:
        """A block, which is used last now, and whose memory nobody else gets meanwhile."""
        with self._lock:
            found = self._found.get((fingerprint, *name))
            if found is not None:
                self._found.move_to_end((fingerprint, *name))
                self.served += 1
                found.lent += 1
        try:
            yield found
        finally:
            if found is not None:
                with self._lock:
                    found.lent -= 1

    def drop(self, fingerprint: bytes, name: Name) -> None:
        """Forget a block."""
        with self._lock:
            if (fingerprint, *name) in self._found:
                self._remove((fingerprint, *name))

    def after(self, fingerprint: bytes, order: int) -> tuple[list[Name], int]:
        """The names that came after the one of an order, at most LISTED, and the order of the last one of these."""
        with self._lock:
            layout = self._layouts.get(fingerprint)
            if layout is None:
                return [], order
            start = bisect_right(layout.log, order, key=itemgetter(0))
            part = layout.log[start : start + LISTED]
            names = [name for number, name in part if self._is_there(fingerprint, (number, name))]
            return names, part[-1][0] if part else order

    def _is_there(self, fingerprint: bytes, entry: tuple[int, Name]) -> bool:
        found = self._found.get((fingerprint, *entry[1]))
        return found is not None and found.order == entry[0]

    def _remove(self, key: _Key) -> ShelvedBlock:
        gone = self._found.pop(key)
        self.used -= len(gone.content) + ENTRY_BYTES
        self._layouts[key[0]].blocks -= 1
        return gone


class KvServer:
    """Serves a shelf to those who have the key, each in a thread, at most MOST_CONNECTIONS; over TLS if there is
    `tls`, and with `nixl` through NIXL for engines that want it."""

    def __init__(
        self, shelf: BlockShelf, key: bytes, listener: socket.socket, tls: ssl.SSLContext | None = None, *,
        nixl: bool = False,
    ) -> None:  # fmt: skip
        self.shelf, self._key, self._listener, self._tls = shelf, key, listener, tls
        self._nixl = nixl
        self.refused = 0  # connections without the key, of another layout, or that said something wrong
        self._epoch = os.urandom(8)
        self._open: set[socket.socket] = set()
        self._agents: set[Peer] = set()  # connections with one of NIXL
        self._ended = False
        self._lock = threading.Lock()

    @property
    def connections(self) -> int:
        """Engines' connections, and those that have not proved anything yet."""
        return len(self._open)

    def run(self) -> None:
        """Serve until `close`."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                refused = self._ended or len(self._open) >= MOST_CONNECTIONS
                if not refused:
                    self._open.add(sock)
            if refused:  # also one that was accepted just before the end
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            self._ended = True
            for sock in self._open:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of TLS is not for two threads

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock = self._secured(sock)
            peer, fingerprint, size = offer(sock, self._key, self._epoch, self.shelf.admit)
            with contextlib.closing(peer):
                if sock.family == socket.AF_UNIX:
                    theirs = passed_area(sock, size, UNANSWERED, HELLO_SECONDS)
                    peer.areas = pass_area(sock, size, 1, HELLO_SECONDS), theirs
                else:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    while True:
                        self._answer(peer, fingerprint, size)
                finally:
                    with self._lock:
                        self._agents.discard(peer)
        except (WireError, ssl.SSLError):
            self.refused += 1
        except OSError:
            pass  # the engine has left
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _secured(self, sock: socket.socket) -> socket.socket:
        """The connection to use: TLS over this one, which is ended in its place. Raises OSError."""
        if self._tls is None:
            return sock
        made = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._open.remove(sock)
            self._open.add(made)
            ended = self._ended
        try:
            if ended:
                raise ConnectionError("the server has ended")
            made.settimeout(HELLO_SECONDS)
            made.do_handshake()
        except BaseException:
            with self._lock:
                self._open.discard(made)
            made.close()
            raise
        return made

    def _answer(self, peer: Peer, fingerprint: bytes, size: int) -> None:
        """Answer a request. Raises OSError, WireError for one that is wrong."""
        shelf, frame = self.shelf, self._request(peer, fingerprint, size)
        name = frame.digest, frame.group
        if frame.kind is Kind.GET:
            with shelf.lent(fingerprint, name) as found:
                content = b"" if found is None else found.content
                answer = Frame(Kind.MISSING, *name)
                if found is not None:
                    answer = Frame(Kind.CONTENT, *name, 0, size, found.sum)
                peer.send(answer, memoryview(content), seconds=_FRAME_SECONDS)
            return
        if frame.kind is Kind.AREA:
            return
        names, number = b"", 0
        if frame.kind is Kind.LIST:
            listed, number = shelf.after(fingerprint, frame.number)
            names = b"".join([NAME.pack(*each) for each in listed])
        elif frame.kind is Kind.DROP:
            shelf.drop(fingerprint, name)
        elif frame.kind is not Kind.PUT:
            raise WireError(f"{frame.kind.name} is no request")
        check = sums_with(self._key, fingerprint).of(bytes(NAME.size), names) if names else bytes(SUM_BYTES)
        peer.send(
            Frame(Kind.DONE, number=number, length=len(names), sum=check), names, seconds=_FRAME_SECONDS
        )

    def _use_nixl(self, peer: Peer, frame: Frame, metadata: bytes, sums: ContentSums, size: int) -> None:
        """Contents of blocks go through NIXL from now on. Raises OSError, and WireError if all agents are in use."""
        with self._lock:
            if len(self._agents) == MOST_AGENTS:
                raise WireError(f"all {MOST_AGENTS} agents of NIXL are in use")
            self._agents.add(peer)
        area = NixlArea(size, 1)
        try:
            area.connect(metadata, frame.number, max(1, frame.group))
            said = area.metadata
            answer = Frame(Kind.AREA, group=1, number=area.address, length=len(said),
                           sum=sums.of(bytes(NAME.size), said))  # fmt: skip
            peer.send(answer, said, seconds=HELLO_SECONDS)
        except BaseException:
            area.close()
            raise
        peer.areas = area, area

    def _request(self, peer: Peer, fingerprint: bytes, size: int) -> Frame:
        """The next request; a content that comes with it is kept. Raises OSError, WireError for one that is wrong."""
        shelf, coming = self.shelf, bytearray()
        reserved = 0
        sums = sums_with(self._key, fingerprint)

        def room(frame: Frame) -> memoryview | None:
            nonlocal coming, reserved
            if frame.kind is Kind.AREA and self._nixl and peer.areas is None:
                coming = bytearray(frame.length)  # of MOST_METADATA or the size of a block at most
                return memoryview(coming)
            if frame.kind is not Kind.PUT or frame.length != size:
                return None
            coming, reserved = shelf.reserve(size), size
            return memoryview(coming)

        try:
            frame = peer.receive(room, seconds=_FRAME_SECONDS, idle=_IDLE_SECONDS)
            if frame.kind is Kind.PUT:
                if not reserved or not sums.fits(NAME.pack(frame.digest, frame.group), coming, frame.sum):
                    raise WireError("a content does not fit its sum")
                reserved = 0
                shelf.put(fingerprint, (frame.digest, frame.group), frame.sum, coming)
            elif frame.kind is Kind.AREA:
                if not coming or not sums.fits(bytes(NAME.size), coming, frame.sum):
                    raise WireError("metadata that do not fit their sum")
                self._use_nixl(peer, frame, bytes(coming), sums, size)
        finally:
            if reserved:
                shelf.release(reserved)
        return frame
