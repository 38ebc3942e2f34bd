"""KV blocks on a server that engines share: `quire kv-server`, over worker.kv_wire.

The engine knows by a list, which it asks for every two seconds, what the server has: a step never waits for an answer.
The server is down when a call fails or takes too long: then nothing is found there and everything is computed, until it
answers again. A content that is not as its engine made it is not used.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator

from quire.core.tier import Name
from quire.worker.kept_blocks import ENTRY_BYTES, KeptBlocks, buffers_of
from quire.worker.kv_file import U8
from quire.worker.kv_wire import NAME, Frame, Kind, Peer, WireError, ask, sums_with

MOST_NAMES = 2**16  # that are known to be on the server
CALL_SECONDS = 1.0  # for a block
_PAUSES = (1.0, 30.0)  # seconds until a server that failed is asked again, and at most
_WRITER = -1
_UNANSWERED = 4  # blocks that are sent before the server has answered for the first of them


def remote_bytes(block_bytes: int) -> int:
    """Memory that the tier takes in an engine."""
    return sum(buffers_of(block_bytes)) * block_bytes + MOST_NAMES * ENTRY_BYTES


class RemoteTier(KeptBlocks):
    """Blocks of `block_bytes` bytes on the server at `address`, by a shared key; see KeptBlocks."""

    kind = "remote"

    def __init__(self, address: tuple[str, int], key: bytes, block_bytes: int, fingerprint: bytes) -> None:
        super().__init__(block_bytes, fingerprint)
        self._address, self._key = address, key
        self._sums = sums_with(key, fingerprint)
        self._names: OrderedDict[Name, None] = OrderedDict()
        self._epoch, self._listed = b"", 0
        self._links: dict[int, tuple[socket.socket, Peer]] = {}  # by reader
        self._sent: deque[Name] = deque()  # blocks for which the server has not answered yet
        self._up = self._was_up = False
        self._retry, self._pause = 0.0, _PAUSES[0]
        self._since = 0.0  # it is up
        self._ending = threading.Event()
        self.begin()

    def __len__(self) -> int:
        return len(self._names)

    @property
    def works(self) -> bool:
        return self._up

    def holds(self, name: Name) -> bool:
        return self._up and name in self._names

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
        if time.monotonic() < self._retry:
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
        if not self._up:
            self._up, self._since = True, time.monotonic()
            if self._was_up:
                self._say("it answers again")
            self._was_up = True

    def _keep(self, name: Name, content: U8, tenant: str) -> None:  # noqa: ARG002
        data = memoryview(content)  # type: ignore[arg-type]
        check = self._sums.of(NAME.pack(*name), data)
        self._settle(_UNANSWERED - 1)
        self._begin(_WRITER, Frame(Kind.PUT, *name, 0, len(data), check), data)
        self._sent.append(name)
        if self._writes.empty():
            self._settle()

    def _settle(self, left: int = 0) -> None:
        """Wait until the server has answered for all blocks that were sent but so many. Raises OSError."""
        while len(self._sent) > left:
            self._end(_WRITER, bytearray())
            self.blocks_out += 1
            with self._lock:
                self._names[self._sent.popleft()] = None

    def _erase(self, name: Name, place: int | None) -> None:  # noqa: ARG002
        if self._up:
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
            return self._links[reader][1].receive(room, seconds=CALL_SECONDS)

    @contextlib.contextmanager
    def _dropping(self, reader: int) -> Iterator[None]:
        """A connection ends with the first thing that fails on it."""
        try:
            yield
        except OSError:
            if (link := self._links.pop(reader, None)) is not None:
                link[0].close()
            if reader == _WRITER:
                self._sent.clear()
            raise

    def _peer(self, reader: int) -> Peer:
        found = self._links.get(reader)
        if found is not None:
            return found[1]
        sock = socket.create_connection(self._address, CALL_SECONDS)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer, epoch = ask(sock, self._key, self.fingerprint, self.block_bytes)
        except BaseException:
            sock.close()
            raise
        if epoch != self._epoch and reader == _WRITER:  # it was started again, with nothing
            with self._lock:
                self._names.clear()
            self._epoch, self._listed = epoch, 0
        self._links[reader] = sock, peer
        return peer

    def _failed(self, error: OSError) -> None:
        now = time.monotonic()
        if self._up and now - self._since > _PAUSES[1]:
            self._pause = _PAUSES[0]
        self._retry, self._pause = now + self._pause, min(2 * self._pause, _PAUSES[1])
        with self._lock:  # of several threads on whose connections it fails, one tells it
            tells = self._up or not self._was_up
            self._up, self._was_up = False, True
        if tells:
            what = (
                "it does not answer in time"
                if isinstance(error, TimeoutError)
                else error.strerror or str(error)
            )
            self._say(f"{what}; KV blocks are computed until it can be used")

    def _say(self, what: str) -> None:
        host, port = self._address
        print(f"quire: KV blocks on {host}:{port}: {what}", file=sys.stderr, flush=True)

    def _closed(self) -> None:
        # A connection that is closed with answers unread is reset, and the server loses what it has not read.
        with contextlib.suppress(OSError):
            self._settle()  # CALL_SECONDS for each of at most _UNANSWERED
        for sock, _ in self._links.values():
            with contextlib.suppress(OSError):
                sock.close()
        self._links.clear()
