"""Blocks that go through memory which an engine and a server of one host share: the same blocks, nothing that is not
sealed, and nothing left when a side dies."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helpers.kv_servers import kv_server
from quire.config.kv_tiers import parse_tiers
from quire.util.listening import BindError, bind_path
from quire.worker.kv_server import ENTRY_BYTES, BlockShelf, KvServer
from quire.worker.kv_wire import UNANSWERED, Peer, WireError, ask
from quire.worker.remote_tier import RemoteTier
from quire.worker.shared_area import SharedArea, pass_area, passed_area

from .keeping import BLOCK, MARK, content_of, fetch, keep, name_of, wait

KEY = b"a key that both sides have"


class Server:
    """A server in this process, on a path."""

    def __init__(self, path: str) -> None:
        self.path, self.shelf = path, BlockShelf(2**20)
        self.server = KvServer(self.shelf, KEY, bind_path(path, 2**18))
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def connect(self) -> tuple[socket.socket, Peer]:
        """As an engine that has proved that it has the key, and has passed no area yet."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(self.path)
        return sock, ask(sock, KEY, MARK, BLOCK)[0]

    def close(self) -> None:
        self.server.close()
        self._thread.join()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.kept_blocks._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("quire.worker.outages.PAUSES", (0.05, 0.1))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(str(tmp_path / "kv.sock"))
    yield made
    made.close()


@contextlib.contextmanager
def tier_at(path: str) -> Iterator[RemoteTier]:
    made = RemoteTier(path, KEY, BLOCK, MARK)
    try:
        yield made
    finally:
        made.close()


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:quire kv")


def test_blocks_go_through_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of their contents, and in any number: slots are used again and again."""
    sent: list[int] = []
    plain = socket.socket.sendall

    def watched(sock: socket.socket, data: bytes) -> None:
        sent.append(len(data))
        plain(sock, data)

    monkeypatch.setattr(socket.socket, "sendall", watched)
    before, most = files(), server.shelf.size // (BLOCK + 1024)
    count = min(most, 6 * UNANSWERED + 1)
    with tier_at(server.path) as first, tier_at(server.path) as second:
        keep(first, *range(count))
        wait(lambda: second.holds(name_of(count - 1)))
        assert fetch(second, *range(count)) == [*range(count)]
        assert fetch(first, *range(count)) == [*range(count)]
        assert mapped() > 0
        assert BLOCK not in sent
        assert second.damaged == first.damaged == 0
    wait(lambda: server.server.connections == 0)
    wait(lambda: files() <= before)
    assert mapped() == 0
    assert server.server.refused == 0


def test_a_content_that_was_changed_there_is_not_believed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = SharedArea.put
    with tier_at(server.path) as tier:
        keep(tier, 1)

        def flipped(area: SharedArea, content: bytes | bytearray | memoryview) -> None:
            changed = bytearray(content)
            changed[7] ^= 1
            put(area, changed)

        monkeypatch.setattr(SharedArea, "put", flipped)
        assert fetch(tier, 1) == []
        assert tier.damaged == 1
        assert tier.reserve(name_of(2))
        refused = server.server.refused
        content = bytearray(BLOCK)
        tier.write(name_of(2), np.frombuffer(content, np.uint8))
        wait(lambda: server.server.refused > refused)
        assert not server.shelf.admit(MARK, BLOCK + 1)
        with server.shelf.lent(MARK, name_of(2)) as found:
            assert found is None


def memory(size: int, seals: int) -> int:
    file = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


SIZE = BLOCK * UNANSWERED
ALL = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    "wrong", ["none", "unsealed", "can shrink", "short", "long", "pipe", "file", "text", "ends"]
)
def test_only_sealed_memory_of_the_right_size_is_taken(server: Server, tmp_path: Path, wrong: str) -> None:
    """Else a peer could make it shorter while it is read, which would kill the process. No file is left open."""
    before = files()
    (tmp_path / "plain").write_bytes(bytes(SIZE))
    sock, _ = server.connect()
    made = {
        "unsealed": lambda: memory(SIZE, 0), "can shrink": lambda: memory(SIZE, fcntl.F_SEAL_GROW),
        "short": lambda: memory(SIZE - 4096, ALL), "long": lambda: memory(SIZE + 4096, ALL),
        "pipe": lambda: os.open("/dev/null", os.O_RDONLY), "file": lambda: os.open(tmp_path / "plain", os.O_RDWR),
    }  # fmt: skip
    with sock:
        if wrong in made:
            file = made[wrong]()
            socket.send_fds(sock, [b"area"], [file])
            os.close(file)
        elif wrong == "text":
            file = memory(SIZE, ALL)
            socket.send_fds(sock, [b"AREA"], [file])
            os.close(file)
        elif wrong == "none":
            sock.sendall(b"area")
        if wrong != "ends":
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b"", "the connection has ended"
    wait(lambda: server.server.connections == 0)
    assert server.server.refused == (wrong != "ends")
    wait(lambda: files() <= before)
    with tier_at(server.path) as tier:
        keep(tier, 1)
        assert fetch(tier, 1) == [1]


def test_who_reads_an_area_cannot_write_or_shorten_it() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        area = pass_area(one, BLOCK, 2, 5.0)
        _, (file,), _, _ = socket.recv_fds(other, 4, 1)
        with pytest.raises(OSError):
            os.ftruncate(file, 0)
        with pytest.raises(OSError):
            os.write(file, b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(file, BLOCK, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(file)
        area.close()
        ours = pass_area(one, BLOCK, 2, 5.0)
        theirs = passed_area(other, BLOCK, 2, 5.0)
        for number in range(7):
            content, room = bytes([number]) * BLOCK, bytearray(BLOCK)
            ours.put(content)
            theirs.take(memoryview(room))
            assert room == content
        ours.close()
        theirs.close()
        one.close()
        with pytest.raises(ConnectionError):
            passed_area(other, BLOCK, 2, 5.0)


def test_a_server_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """And one that is started again at its path is used again, with nothing in it."""
    key, path = tmp_path / "key", str(tmp_path / "kv.sock")
    key.write_bytes(KEY)
    before = files()

    def started() -> contextlib.AbstractContextManager[tuple[subprocess.Popen[str], int]]:
        return kv_server(key, 0, "--uds", path)

    with tier_at(path) as tier:
        with started() as (process, _):
            wait(lambda: tier.works)
            keep(tier, 1, 2)
            assert fetch(tier, 1, 2) == [1, 2]
            assert os.stat(path).st_mode & 0o777 == 0o600
            with pytest.raises(BindError, match="another server"):
                bind_path(path, 2**18)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert fetch(tier, 1) == []
        wait(lambda: not tier.works)
        with started() as (process, _):

            def used_again() -> bool:  # once each thread has noticed that its connection has ended
                if tier.reserve(name_of(3)):
                    tier.write(name_of(3), content_of(3))
                wait(lambda: not tier.writes)
                return fetch(tier, 3) == [3]

            wait(used_again)
            assert fetch(tier, 1) == []
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        assert not os.path.exists(path)
    assert mapped() == 0
    wait(lambda: files() <= before)


ENGINE = """
import sys
sys.path.insert(0, {tests!r})
from quire.worker.remote_tier import RemoteTier
from worker.keeping import BLOCK, MARK, content_of, name_of
tier = RemoteTier({path!r}, {key!r}, BLOCK, MARK)
number = read = 0
while True:
    if tier.room and tier.reserve(name_of({first} + number)):
        tier.write(name_of({first} + number), content_of({first} + number))
        number += 1
    if read < tier.blocks_out:
        tier.read(0, name_of({first} + read))
        read += 1
        if read == 12:
            print("writing", flush=True)
    tier.arrived(64)
"""


@pytest.mark.parametrize("times", [2, pytest.param(60, marks=pytest.mark.chaos)])
def test_an_engine_that_is_killed_leaves_nothing_torn_and_others_go_on(server: Server, times: int) -> None:
    """kill -9 while it writes and reads, at any moment. Another engine reads and writes meanwhile."""
    rng = random.Random(times)
    with tier_at(server.path) as other:
        keep(other, *range(8))
        # Each of its threads has a connection.
        wait(lambda: fetch(other, *range(8)) == [*range(8)] and server.server.connections == 3)
        files_before, mapped_before = files(), mapped()
        for first in range(1000, 1000 + 10_000 * times, 10_000):
            code = ENGINE.format(tests=str(Path(__file__).parents[1]), path=server.path, key=KEY, first=first)
            engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            assert engine.stdout is not None
            assert engine.stdout.readline() == "writing\n"
            until = time.monotonic() + rng.uniform(0, 0.05)
            while time.monotonic() < until:
                fetch(other, *(number for number in range(first, first + 50) if knows(other, number)))
            engine.kill()
            engine.wait()
            engine.stdout.close()
            wait(lambda: server.server.connections == 3)
            wait(lambda: (files(), mapped()) == (files_before, mapped_before))
            there = [number for number in range(first, first + 10_000) if knows(server, number)]
            assert len(there) >= 11
            wait(lambda there=there: all(knows(other, number) for number in there))  # type: ignore[misc]
            assert fetch(other, *there) == there
            keep(other, first + 9999)
            assert fetch(other, first + 9999) == [first + 9999]
        assert other.damaged == server.server.refused == 0
        used = sum(BLOCK + ENTRY_BYTES for _ in range(len(server.shelf)))
        assert server.shelf.used == used, "no room is held for what never came"


def knows(one: RemoteTier | Server, number: int) -> bool:
    """Whether a block is known to a tier, or is with a server."""
    if isinstance(one, RemoteTier):
        return one.holds(name_of(number))
    with one.shelf.lent(MARK, name_of(number)) as found:
        return found is not None


class LateListener:
    """A listener whose last connection is accepted just before it ends."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.accepted, self.ended = threading.Event(), threading.Event()

    def accept(self) -> tuple[socket.socket, object]:
        made = self._listener.accept()
        self.accepted.set()
        assert self.ended.wait(30)
        return made

    def shutdown(self, how: int) -> None:
        self._listener.shutdown(how)

    def close(self) -> None:
        self._listener.close()


def test_nobody_is_served_who_came_just_before_the_end(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    listener = LateListener(bind_path(path, 2**18))
    server = KvServer(BlockShelf(2**20), KEY, listener)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    thread.start()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(path)
        assert listener.accepted.wait(30)
        server.close()
        listener.ended.set()
        assert sock.recv(1) == b"", "it has no thread of its own, which nobody would end"
    thread.join(30)
    assert server.connections == 0


def test_areas_are_of_those_who_have_the_key(server: Server) -> None:
    sock = socket.socket(socket.AF_UNIX)
    with sock:
        sock.settimeout(5)
        sock.connect(server.path)
        with pytest.raises((WireError, ConnectionError)):
            ask(sock, b"another key of sixteen bytes", MARK, BLOCK)
    wait(lambda: server.server.refused == 1)
    assert mapped() == 0


def test_a_path_in_place_of_an_address() -> None:
    found = parse_tiers("ram=1MiB,remote=/run/quire/kv.sock:/etc/kv.key,role=both")
    assert (found.remote, found.key_file, found.role) == ("/run/quire/kv.sock", "/etc/kv.key", "both")
    for wrong in ("remote=/run/kv.sock", "remote=/run/kv.sock:", "remote=run/kv.sock:/key", "remote=:/key"):
        with pytest.raises(ValueError, match="not a tier"):
            parse_tiers(wrong)
