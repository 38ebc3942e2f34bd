"""KV blocks on a server that engines share: who may use it, how much it holds, and that nothing wrong is ever read."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.kv_servers import ServerHere
from quire.routing.tickets import read_key
from quire.worker import outages, remote_tier
from quire.worker.kept_blocks import buffers_of
from quire.worker.kv_server import ENTRY_BYTES, MOST_CONNECTIONS, BlockShelf, KvServer
from quire.worker.kv_wire import NAME, Frame, Kind, WireError, ask, sums_with
from quire.worker.remote_tier import RemoteTier

from .keeping import BLOCK, MARK, content_of, fetch, keep, name_of, wait

KEY = b"a key that both sides have"

Make = Callable[..., RemoteTier]


class Shelf(ServerHere[KvServer]):
    """A server in this process, and clients of it."""

    def __init__(self, size: int = 2**20) -> None:
        super().__init__(KvServer, KEY, size)

    @property
    def shelf(self) -> BlockShelf:
        return self.server.shelf

    def connect(
        self, key: bytes = KEY, mark: bytes = MARK, size: int = BLOCK
    ) -> tuple[socket.socket, object]:
        sock = socket.create_connection(("127.0.0.1", self.port), 5)
        return sock, ask(sock, key, mark, size)[0]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines look for new names more often than they do."""
    monkeypatch.setattr("quire.worker.kept_blocks._LOOK_SECONDS", 0.05)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf()
    yield made
    made.close()


@pytest.fixture
def make(shelf: Shelf) -> Iterator[Make]:
    made: list[RemoteTier] = []

    def tier(*, key: bytes = KEY, mark: bytes = MARK, block: int = BLOCK, port: int = 0) -> RemoteTier:
        made.append(RemoteTier(("127.0.0.1", port or shelf.port), key, block, mark))
        return made[-1]

    yield tier
    for one in made:
        one.close()


def test_engines_find_what_others_have_kept(make: Make, shelf: Shelf) -> None:
    first = make()
    keep(first, 1, 2, 3)
    assert not first.reserve(name_of(2)), "it is there already"
    assert fetch(first, 1, 2, 3, 4) == [1, 2, 3]
    second = make()
    wait(lambda: second.holds(name_of(3)))
    assert not second.holds(name_of(4))
    assert fetch(second, 3, 1) == [1, 3]
    keep(first, 4)
    wait(lambda: second.holds(name_of(4)))  # by the next look
    assert (first.blocks_out, second.blocks_in, len(shelf.shelf)) == (4, 2, 4)
    second.forget(name_of(4))
    assert not second.holds(name_of(4))
    wait(lambda: len(shelf.shelf) == 3)
    assert fetch(first, 4) == []
    second.clear()
    assert not second.holds(name_of(1))
    assert fetch(first, 1) == [1]


def test_what_is_held_has_a_bound_and_the_oldest_makes_room(make: Make, shelf: Shelf) -> None:
    most = shelf.size // (BLOCK + ENTRY_BYTES)
    tier = make()
    keep(tier, *range(most))
    assert fetch(tier, 0) == [0]
    keep(tier, most, most + 1)
    assert len(shelf.shelf) == most
    assert shelf.shelf.used <= shelf.size
    assert fetch(tier, 0, 1, 2, 3, most + 1) == [0, 3, most + 1]
    assert not tier.holds(name_of(1)), "known by now"
    late = make()
    wait(lambda: late.holds(name_of(most + 1)))
    assert len(late) == most
    shelf.shelf.reserve(shelf.shelf.largest)  # one that comes has its room before it is there
    assert shelf.shelf.used <= shelf.size
    shelf.shelf.reserve(shelf.shelf.largest)
    shelf.shelf.reserve(shelf.shelf.largest)
    with pytest.raises(WireError, match="too many contents"):
        shelf.shelf.reserve(shelf.shelf.largest)
    assert shelf.shelf.used <= shelf.size


def test_lists_are_long_and_skip_what_has_gone(shelf: Shelf) -> None:
    made = BlockShelf(2**26)
    assert made.admit(MARK, 10)
    for number in range(10_000):
        made.reserve(10)
        made.put(MARK, name_of(number), b"", bytearray(10))
        if number % 2:
            made.drop(MARK, name_of(number))
    found, order = [], 0
    while True:
        names, last = made.after(MARK, order)
        if last == order:
            break
        found, order = found + names, last
    assert found == [name_of(number) for number in range(0, 10_000, 2)]
    assert made.after(b"n" * 64, 0) == ([], 0)
    assert made.used == 5000 * (10 + ENTRY_BYTES)
    assert len(made._layouts[MARK].log) <= 2 * 5000 + 64


def test_without_the_key_there_is_nothing(
    make: Make, shelf: Shelf, capfd: pytest.CaptureFixture[str]
) -> None:
    tier = make(key=b"another key of sixteen bytes")
    wait(lambda: shelf.server.refused >= 1)
    wait(lambda: "cannot" in str(capfd.readouterr().err) or tier._outages.was_up)
    assert not tier.works
    assert not tier.reserve(name_of(1))
    assert fetch(tier, 1) == []
    with pytest.raises((WireError, ConnectionError)):
        shelf.connect(key=b"another key of sixteen bytes")
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n" * 20, os.urandom(500)):
        with socket.create_connection(("127.0.0.1", shelf.port), 5) as sock:
            said = b""
            with contextlib.suppress(OSError):  # the server may have ended it at any of these
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
                while part := sock.recv(4096):
                    said += part
            assert len(said) <= 51, "its greeting alone"
    assert len(shelf.shelf) == 0


def test_a_server_without_the_key_is_not_believed(capfd: pytest.CaptureFixture[str]) -> None:
    """Nor one that is none."""
    for key, first in (
        (b"not the key of the engine", b""),
        (KEY, b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 500),
    ):
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if not first:
            server = KvServer(BlockShelf(2**20), key, listener)
            threading.Thread(target=server.run, daemon=True).start()
        tier = RemoteTier(("127.0.0.1", port), KEY, BLOCK, MARK)
        if first:
            sock, _ = listener.accept()
            sock.sendall(first)
        wait(lambda tier=tier: tier._outages.was_up)  # type: ignore[misc]
        assert not tier.works
        tier.close()
        listener.close()
    assert "KV blocks are computed until it can be used" in capfd.readouterr().err


def test_other_layouts_are_refused(make: Make, shelf: Shelf) -> None:
    keep(make(), 1)
    with pytest.raises(WireError, match="keeps no blocks of 6000 bytes of this model"):
        shelf.connect(size=6000)
    with pytest.raises(WireError, match="keeps no blocks"):
        shelf.connect(mark=b"l" * 64, size=shelf.size)
    other = make(mark=b"n" * 64)
    wait(lambda: other.works)
    assert not other.holds(name_of(1))
    assert fetch(other, 1) == [], "another model's blocks are not found under the same names"


@pytest.mark.parametrize("wrong", ["size", "sum", "kind", "replayed", "head", "long"])
def test_wrong_frames_end_the_connection(shelf: Shelf, wrong: str) -> None:
    sock, peer = shelf.connect()
    content = bytes(content_of(1))
    check = sums_with(KEY, MARK).of(NAME.pack(*name_of(1)), content)
    frame = Frame(Kind.PUT, *name_of(1), 0, BLOCK, check)
    if wrong == "size":
        peer.send(frame._replace(length=100), content[:100], seconds=5)
    elif wrong == "long":
        peer.send(frame._replace(length=2**40), content, seconds=5)
    elif wrong == "sum":
        peer.send(frame, content[:-1] + b"?", seconds=5)
    elif wrong == "kind":
        peer.send(Frame(Kind.CONTENT, *name_of(1)), seconds=5)
    elif wrong == "head":
        peer._keys = b"x" * 32, peer._keys[1]
        peer.send(frame, content, seconds=5)
    else:
        peer.send(frame, content, seconds=5)
        assert peer.receive(lambda _: None, seconds=5).kind is Kind.DONE
        peer._sent = 0
        peer.send(frame, content, seconds=5)
    with pytest.raises(OSError, match=r"ended|reset"):
        peer.receive(lambda _: None, seconds=5)
    sock.close()
    assert len(shelf.shelf) == (wrong == "replayed")
    wait(lambda: shelf.server.refused == 1)
    assert shelf.shelf.used == len(shelf.shelf) * (BLOCK + ENTRY_BYTES), "no room is lost"


@pytest.mark.parametrize("sent", [30, 88, 2000])
def test_a_frame_that_is_cut_off_leaves_nothing(shelf: Shelf, sent: int) -> None:
    """In its head, behind it, or in the content."""
    sock, peer = shelf.connect()
    content = bytes(content_of(1))
    frames: list[bytes] = []
    peer._sock = type("Sink", (), {"sendall": frames.append, "settimeout": lambda *_: None})()  # type: ignore[assignment]
    check = sums_with(KEY, MARK).of(NAME.pack(*name_of(1)), content)
    peer.send(Frame(Kind.PUT, *name_of(1), 0, BLOCK, check), content, seconds=5)
    sock.sendall(b"".join(map(bytes, frames))[:sent])
    if sent > 1000:
        wait(lambda: shelf.shelf.used > 0)
    sock.close()
    wait(lambda: shelf.server.connections == 0)
    assert (len(shelf.shelf), shelf.shelf.used) == (0, 0)


def test_flipped_bits_are_never_read(make: Make, shelf: Shelf) -> None:
    """In the server's memory, by itself or by an error."""
    tier = make()
    keep(tier, 1, 2, 3)
    first, second, third = (shelf.shelf._found[MARK, *name_of(number)] for number in (1, 2, 3))
    first.content[17] ^= 1
    second.content = third.content  # exchanged
    assert fetch(tier, 1, 2, 3) == [3]
    assert tier.damaged == 2
    wait(lambda: len(shelf.shelf) == 1)


def test_bytes_changed_on_the_way_are_never_read(make: Make, shelf: Shelf) -> None:
    """A stand-in for the network flips a bit now and then, in both directions; what is read is right or nothing."""
    rng, stopped = random.Random(5), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not stopped.is_set() and (data := bytearray(here.recv(3000))):
                if rng.random() < 0.03:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                there.sendall(data)
        for sock in (here, there):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = listener.accept()
                there = socket.create_connection(("127.0.0.1", shelf.port))
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=pass_on, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    keep(make(), *range(40))
    came = lost = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outages, "PAUSES", (0.001, 0.001))
        patch.setattr("quire.worker.kept_blocks._LOOK_SECONDS", 0.001)
        tier = RemoteTier(listener.getsockname(), KEY, BLOCK, MARK)
        for number in range(100, 140):
            wait(lambda: tier.works)
            if tier.reserve(name_of(number)):
                tier.write(name_of(number), content_of(number))
            found = len(fetch(tier, *rng.sample(range(40), 3)))
            came, lost = came + found, lost + 3 - found
    assert came > 30
    assert lost > 5
    assert shelf.server.refused > 0
    for name in list(shelf.shelf._found):
        content = content_of(int(name[1].split()[1]))
        assert shelf.shelf._found[name].content == content.tobytes()
    stopped.set()
    shelf.server.close()
    tier.close()
    listener.close()


def test_a_server_that_is_gone_or_hangs_costs_nothing_but_its_blocks(
    make: Make, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(outages, "say", said.append)
    monkeypatch.setattr(outages, "PAUSES", (0.05, 0.1))
    tier = make()
    keep(tier, 1, 2, 3)
    shelf.stop()
    tier._outages.pause = 0.05
    assert fetch(tier, 1, 2, 3) == []
    assert not tier.works
    assert not tier.holds(name_of(1))
    assert tier.room == 0
    assert not tier.reserve(name_of(7))
    shelf.start()  # with nothing in it
    wait(lambda: tier.works)
    assert not tier.holds(name_of(1))
    keep(tier, *range(1, 9))
    assert fetch(tier, *range(1, 9)) == [*range(1, 9)], "readers do not use connections from before"
    for line in ("KV blocks are computed until it can be used", "it answers again"):
        wait(lambda line=line: any(line in each for each in said))  # type: ignore[misc]
        assert sum(line in each for each in said) == 1
    monkeypatch.setattr(remote_tier, "CALL_SECONDS", 0.1)
    monkeypatch.setattr(shelf.server, "_answer", lambda *_: time.sleep(0.5))
    begun = time.monotonic()
    # none that is there: a connection that waits for a request already still answers that one
    assert fetch(tier, *range(20, 26)) == []
    assert time.monotonic() - begun < 20
    assert not tier.works


def test_what_was_handed_over_is_there_after_the_end(
    make: Make, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "CALL_SECONDS", 60.0)
    tier = make()
    wait(lambda: tier.works)
    for number in range(4):
        assert tier.reserve(name_of(number))
        tier.write(name_of(number), content_of(number))
    tier.close()
    assert (tier.blocks_out, len(shelf.shelf)) == (4, 4)


def test_connections_are_few(shelf: Shelf) -> None:
    socks = [socket.create_connection(("127.0.0.1", shelf.port), 5) for _ in range(MOST_CONNECTIONS)]
    wait(lambda: shelf.server.connections == MOST_CONNECTIONS)
    with socket.create_connection(("127.0.0.1", shelf.port), 5) as late:
        assert late.recv(100) == b""
    for sock in socks:
        sock.close()
    wait(lambda: shelf.server.connections == 0)
    shelf.connect()[0].close()


def test_what_waits_is_bounded(make: Make) -> None:
    tier = make()
    wait(lambda: tier.works)
    writes, reads = buffers_of(BLOCK)
    with tier._lock:  # the writer stops at the first
        took = sum(tier.reserve(name_of(number)) for number in range(writes + 5))
        assert took == writes
        assert (tier.room, tier.refused) == (0, 5)
    for number in range(writes):
        tier.write(name_of(number), content_of(number))
    wait(lambda: not tier.writes)
    assert fetch(tier, *range(writes)) == [*range(writes)]
    assert tier._buffers.qsize() + len(tier._lent) == reads


def test_keys_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"  0123456789abcdef\n")
    assert read_key(str(tmp_path / "key")) == b"0123456789abcdef"
    for content, says in (
        (b"short\n", "16 to 4096 bytes"),
        (b"x" * 5000, "16 to 4096 bytes"),
        (None, "No such file"),
    ):
        (tmp_path / "key").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "key").write_bytes(content)
        with pytest.raises(ValueError, match=says):
            read_key(str(tmp_path / "key"))
