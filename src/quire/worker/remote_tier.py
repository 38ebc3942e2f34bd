"""KV blocks on a server that engines share: `quire kv-server`, over worker.kv_wire.

The engine knows by a list, which it asks for every two seconds, what the server has: a step never waits for an answer.
The server is down when a call fails or takes too long: then nothing is found there and everything is computed, until it
answers again. A content that is not as its engine made it is not used.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator

from quire.core.tier import Name
from quire.worker.kept_blocks import ENTRY_BYTES, READERS, KeptBlocks, buffers_of
from quire.worker.kv_file import U8
from quire.worker.kv_wire import (
    HELLO_SECONDS,
    NAME,
    UNANSWERED,
    Frame,
    Kind,
    OldConnectionError,
    Peer,
    WireError,
    ask,
    sums_with,
)
from quire.worker.nixl_area import AGENT_BYTES, NixlArea
from quire.worker.outages import Outages
from quire.worker.shared_area import pass_area, passed_area

MOST_NAMES = 2**16  # that are known to be on the server
CALL_SECONDS = 1.0  # for a block
_WRITER = -1


def remote_bytes(block_bytes: int, *, shared: bool = False, nixl: bool = False) -> int:
    """Memory that the tier takes in an engine, with what it shares with a server of this host, or what NIXL takes."""
    blocks = sum(buffers_of(block_bytes)) + shared * (UNANSWERED + READERS)
    blocks += nixl * (UNANSWERED + 1 + 2 * READERS)
    return blocks * block_bytes + MOST_NAMES * ENTRY_BYTES + nixl * (1 + READERS) * AGENT_BYTES


class RemoteTier(KeptBlocks):
    """Blocks of `block_bytes` bytes on the server at `address`, host and port or the path of a Unix socket, by a shared
    key, and over TLS if there is `tls`; contents through NIXL with `nixl`. See KeptBlocks."""

    kind = "remote"

    def __init__(
        self, address: tuple[str, int] | str, key: bytes, block_bytes: int, fingerprint: bytes,
        tls: ssl.SSLContext | None = None, *, nixl: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(block_bytes, fingerprint)
        self._address, self._key, self._tls, self._nixl = address, key, tls, nixl
        self._sums = sums_with(key, fingerprint)
        self._names: OrderedDict[Name, None] = OrderedDict()
        self._epoch, self._listed = b"", 0
        self._links: dict[int, Peer] = {}  # by reader
        at = address if isinstance(address, str) else ":".join(map(str, address))
        self._outages = Outages(f"on {at}")
        self._sent: deque[Name] = deque()  # blocks for which the server has not answered yet
        self._ending = threading.Event()
        self.begin()

    def __len__(self) -> int:
        return len(self._names)

    @property
    def works(self) -> bool:
        return self._outages.up

    def holds(self, name: Name) -> bool:
        return self._outages.up and name in self._names

    def clear(self) -> None:
        """Find nothing that is there now; others may."""
        with self._lock:
            self._names.clear()

    def close(self) -> None:
        self._ending.set()
        super().close()

    # -- the threads --------------------------------------------------------------------------------------

    def _lose(self, name: Name) -> None:
        with self._lock:
            self._names.pop(name, None)

    def _load(self) -> None:
        """Nothing is left from before."""

    def _look(self) -> None:
        if self._outages.pausing:
            return
        more = True
        while more and not self._ending.is_set():
            listed = bytearray()
            answer = self._call(_WRITER, Frame(Kind.LIST, number=self._listed), listed)
            if listed and not self._sums.fits(bytes(NAME.size), listed, answer.sum):
                raise WireError("a list that does not fit its sum")
            names = [*NAME.iter_unpack(listed)]
            with self._lock:
                for name in names:
                    self._names[name] = None
                    self._names.move_to_end(name)
                while len(self._names) > MOST_NAMES:
                    self._names.popitem(last=False)
            more, self._listed = answer.number > self._listed and bool(names), answer.number
        self._outages.answers()

    def _keep(self, name: Name, content: U8, tenant: str) -> None:  # noqa: ARG002
        data = memoryview(content)  # type: ignore[arg-type]
        check = self._sums.of(NAME.pack(*name), data)
        self._settle(UNANSWERED - 1)
        self._begin(_WRITER, Frame(Kind.PUT, *name, 0, len(data), check), data)
        self._sent.append(name)
        if self._writes.empty():
            self._settle()

    def _settle(self, left: int = 0) -> None:
        """Wait until the server has answered for all blocks that were sent but so many. Raises OSError."""
        self._drop_old(_WRITER)
        while len(self._sent) > left:
            self._end(_WRITER, bytearray())
            self.blocks_out += 1
            with self._lock:
                self._names[self._sent.popleft()] = None

    def _erase(self, name: Name, place: int | None) -> None:  # noqa: ARG002
        if self._outages.up:
            self._call(_WRITER, Frame(Kind.DROP, *name), bytearray())

    def _fetch(self, name: Name, into: U8, reader: int) -> bool:
        room = memoryview(into)  # type: ignore[arg-type]
        answer = self._call(reader, Frame(Kind.GET, *name), room)
        if answer.kind is Kind.CONTENT and (answer.digest, answer.group, answer.length) == (*name, len(room)):
            if self._sums.fits(NAME.pack(*name), room, answer.sum):
                return True
            self.damaged += 1
            self.forget(name)
        self._lose(name)
        return False

    def _call(self, reader: int, frame: Frame, into: bytearray | memoryview) -> Frame:
        """Ask, and wait for the answer, whose content is put into `into`. Raises OSError."""
        if reader == _WRITER:
            self._settle()
        self._begin(reader, frame)
        return self._end(reader, into)

    def _begin(self, reader: int, frame: Frame, content: memoryview | bytes = b"") -> None:
        """Ask. Raises OSError."""
        with self._dropping(reader):
            self._peer(reader).send(frame, content, seconds=CALL_SECONDS)

    def _end(self, reader: int, into: bytearray | memoryview) -> Frame:
        """Wait for the answer. Raises OSError."""

        def room(answer: Frame) -> memoryview:
            if isinstance(into, bytearray):
                into.extend(bytes(answer.length))
                return memoryview(into)
            return into

        with self._dropping(reader):
            return self._links[reader].receive(room, seconds=CALL_SECONDS)

    @contextlib.contextmanager
    def _dropping(self, reader: int) -> Iterator[None]:
        """A connection ends with the first thing that fails on it."""
        try:
            yield
        except OSError:
            if self._drop_old(reader):
                raise OldConnectionError("a connection from before an outage") from None
            self._drop(reader)
            raise

    def _drop_old(self, reader: int) -> bool:
        """End a connection that is from before the last outage; whether it was."""
        old = reader in self._links and self._outages.is_old(reader)
        if old:
            self._drop(reader)
        return old

    def _drop(self, reader: int) -> None:
        if (link := self._links.pop(reader, None)) is not None:
            link.close()
        if reader == _WRITER:
            self._sent.clear()

    def _peer(self, reader: int) -> Peer:
        self._drop_old(reader)
        found = self._links.get(reader)
        if found is not None:
            return found
        self._outages.connecting(reader)
        with contextlib.ExitStack() as opened:
            sock = opened.enter_context(self._connected())
            peer, epoch = ask(sock, self._key, self.fingerprint, self.block_bytes)
            opened.callback(peer.close)
            if sock.family == socket.AF_UNIX:
                ours = pass_area(sock, self.block_bytes, UNANSWERED, HELLO_SECONDS)
                opened.callback(ours.close)
                peer.areas = ours, passed_area(sock, self.block_bytes, 1, HELLO_SECONDS)
            elif self._nixl:
                area = NixlArea(self.block_bytes, UNANSWERED if reader == _WRITER else 1)
                opened.callback(area.close)
                self._exchange(peer, area)
                peer.areas = area, area
            opened.pop_all()
        if epoch != self._epoch and reader == _WRITER:  # it was started again, with nothing
            with self._lock:
                self._names.clear()
            self._epoch, self._listed = epoch, 0
        self._links[reader] = peer
        return peer

    def _exchange(self, peer: Peer, area: NixlArea) -> None:
        """Tell the server where the memory of this side is, and hear the same of it. Raises OSError."""
        said = area.metadata
        check = self._sums.of(bytes(NAME.size), said)
        asked = Frame(Kind.AREA, group=area.slots, number=area.address, length=len(said), sum=check)
        peer.send(asked, said, seconds=HELLO_SECONDS)
        heard = bytearray()

        def room(answer: Frame) -> memoryview:
            heard.extend(bytes(answer.length))
            return memoryview(heard)

        answer = peer.receive(room, seconds=HELLO_SECONDS)
        if answer.kind is not Kind.AREA or not self._sums.fits(bytes(NAME.size), heard, answer.sum):
            raise WireError("a server without NIXL")
        area.connect(bytes(heard), answer.number, answer.group)

    def _connected(self) -> socket.socket:
        if isinstance(self._address, tuple):
            sock = socket.create_connection(self._address, CALL_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                return (
                    sock
                    if self._tls is None
                    else self._tls.wrap_socket(sock, server_hostname=self._address[0])
                )
            except BaseException:
                sock.close()
                raise
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(CALL_SECONDS)
            sock.connect(self._address)
        except BaseException:
            sock.close()
            raise
        return sock

    def _failed(self, error: OSError) -> None:
        what = ""
        if isinstance(error, ssl.SSLError):
            what = f"TLS: {getattr(error, 'verify_message', '') or error.reason or error}"
        self._outages.failed(error, what)

    def _closed(self) -> None:
        # A connection that is closed with answers unread is reset, and the server loses what it has not read.
        with contextlib.suppress(OSError):
            self._settle()  # CALL_SECONDS for each of at most UNANSWERED
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.close()
        self._links.clear()
