"""The protocol by itself, callback by callback. Tokens of one step: all made, then all sent; several of one stream in
one write. Headers in pieces, and late.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import types
from typing import Any

import pytest

from helpers.server import plenty
from helpers.wire import ask, connect, turns
from quire.config.serving import ServingConfig
from quire.server.connections import Connections
from quire.server.context import ServerContext
from quire.server.errors import ApiError
from quire.server.exchange import Exchange
from quire.server.metrics import ServerMetrics
from quire.server.protocol import MAX_HEADER_BYTES


def test_chunks_are_sent_together_after_the_callback() -> None:
    asyncio.run(send_together())


async def send_together() -> None:
    log: list[tuple[str, bytes]] = []
    (one, _), (two, wire), (three, _) = connect(Connections(10, 10.0), "abc", log)
    woken = asyncio.get_running_loop().create_future()

    async def task() -> None:
        await woken
        log.append(("task", b""))

    waiting = asyncio.create_task(task())
    await asyncio.sleep(0)
    for data in (b"first", b"second"):  # two steps that were read at once
        for protocol in (one, two, three):
            assert protocol.write_chunk(data[:2], data[2:3], data[3:]) == len(data)
    woken.set_result(None)  # a task that is woken afterwards sends afterwards
    wire.closing = True
    assert log == []
    await waiting
    both = b"5\r\nfirst\r\n6\r\nsecond\r\n"
    assert log == [("a", both), ("c", both), ("task", b"")]
    one.write_chunk(b"x" * 8, b"x", b"x" * 7)
    await asyncio.sleep(0)
    assert log[3:] == [("a", b"10\r\n" + b"x" * 16 + b"\r\n")]


def test_blocked_follows_the_transport() -> None:
    asyncio.run(follow())


async def follow() -> None:
    ((protocol, wire),) = connect(Connections(10, 10.0), "a", [])
    assert not protocol._blocked()
    protocol.pause_writing()
    assert protocol._blocked()
    assert protocol.write_chunk(b"a", b"b", b"c") == 0
    protocol.resume_writing()
    assert not protocol._blocked()
    wire.closing = True
    assert protocol._blocked()


def test_a_socket_is_written_to_while_nothing_is_buffered_for_it() -> None:
    asyncio.run(write_past_the_transport())


async def write_past_the_transport() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        log: list[tuple[str, bytes]] = []
        ((protocol, wire),) = connect(Connections(10, 10.0), "a", log, {"socket": ours})

        async def send(data: bytes) -> bytes:
            log.clear()
            assert protocol.write_chunk(data[:2], data[2:3], data[3:]) == len(data)
            await asyncio.sleep(0)
            return b"".join(part for _, part in log)

        assert await send(b"first") == b""
        assert theirs.recv(100) == b"5\r\nfirst\r\n"
        wire.buffered = 1  # order: behind what waits
        assert await send(b"second") == b"6\r\nsecond\r\n"
        wire.buffered = 0
        large = bytes(10**7)  # more than a socket takes: the rest is the transport's
        rest = await send(large)
        taken = len(large) + len(b"989680\r\n\r\n") - len(rest)
        assert 0 < taken < len(large)
        assert (b"989680\r\n" + large + b"\r\n").endswith(rest)
        assert await send(b"third") == b"5\r\nthird\r\n"  # full: all of it
        wire.closing = True
        assert await send(b"gone") == b""
    wire.closing = False
    assert await send(b"failed") == b"6\r\nfailed\r\n"  # the transport meets the failure


def test_tls_is_the_transports() -> None:
    asyncio.run(leave_tls_alone())


async def leave_tls_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        log: list[tuple[str, bytes]] = []
        extra = {"socket": ours, "sslcontext": object()}
        ((protocol, _),) = connect(Connections(10, 10.0), "a", log, extra)
        protocol.write_chunk(b"", b"secret", b"")
        await asyncio.sleep(0)
        assert log == [("a", b"6\r\nsecret\r\n")]


def answer(said: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said)


POST = b"POST /p HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n%b\r\nhello"
CHUNKED = b"POST /c HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x\r\nde\r\n0\r\nt: u\r\n\r\n"
UPGRADE = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
GET = b"GET /g?x=y HTTP/1.1\r\nhost: localhost\r\n%b\r\n"
HELLO, ABCDE = answer(b"/p hello"), answer(b"/c abcde")


@pytest.mark.parametrize(
    ("data", "answers"),
    [
        (
            b"\r\n" + GET % b"" + POST % b"" + CHUNKED + GET % b"",
            answer(b"/g ") + HELLO + ABCDE + answer(b"/g "),
        ),
        (POST % UPGRADE + GET % UPGRADE + CHUNKED, HELLO + answer(b"/g ") + ABCDE),
        (
            POST % UPGRADE.replace(b"n: ", b"n: close, "),
            HELLO.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        ),
        (CHUNKED + GET % b"" + CHUNKED.replace(b"2;x", b"x;2"), ABCDE + answer(b"/g ") + b"HTTP/1.1 400 "),
        (CHUNKED + b"NONSENSE\r\n\r\n", ABCDE + b"HTTP/1.1 400 "),
        (POST.replace(b"5", b"-5") % b"", b"HTTP/1.1 400 "),
        (CHUNKED.replace(b"transfer", b"content-length: 3\r\ntransfer"), b"HTTP/1.1 400 "),
        (GET % b"a b: c\r\n", b"HTTP/1.1 400 "),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"HTTP/1.1 505 "),
    ],
    ids=[
        "pipelined",
        "upgrades",
        "an upgrade and the end",
        "then a bad chunk",
        "then nonsense",
        "length",
        "length and chunks",
        "space",
        "HTTP/2",
    ],
)
def test_reads_may_end_anywhere(data: bytes, answers: bytes) -> None:
    async def work() -> None:
        whole = await ask(data)
        assert whole.startswith(answers)
        assert await ask(*(data[i : i + 1] for i in range(len(data)))) == whole
        for at in range(1, len(data)):
            assert await ask(data[:at], data[at:]) == whole, at

    asyncio.run(work())


def request(size: int) -> bytes:
    """A request whose headers count `size` bytes."""
    start = b"GET /version HTTP/1.1\r\nhost: localhost\r\na: "
    counted = len(b"/version") + len(b"host") + len(b"localhost") + len(b"a") + 2 * 4
    return start + b"b" * (size - counted) + b"\r\n\r\n"


@pytest.mark.parametrize("size", [10_000, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1])
@pytest.mark.parametrize("piece", [1000, 2**20, 7])
def test_headers_in_pieces_cost_the_same_as_in_one(size: int, piece: int) -> None:
    """On a connection that brings several such requests, cut anywhere."""
    asyncio.run(send_in_pieces(request(size), piece, fits=size <= MAX_HEADER_BYTES))


async def send_in_pieces(data: bytes, piece: int, *, fits: bool) -> None:
    ((server, wire),) = connect(Connections(10, 10.0), "a", [])
    for number in range(1, 4):
        for at in range(0, len(data), piece):
            server.data_received(data[at : at + piece])
        await turns()
        if not fits:
            assert wire.sent().startswith(b"HTTP/1.1 431 ")
            return
        assert wire.sent() == answer(b"/version ") * number


@pytest.mark.parametrize("came", [b"\r\n", b""])
def test_data_that_arrived_during_a_suspension_is_not_late(
    came: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers that are due come first then."""
    monkeypatch.setattr("quire.server.protocol.GRACE_SECONDS", 60.0 if came else 0.0)
    asyncio.run(be_late(came))


async def be_late(came: bytes) -> None:
    ((server, wire),) = connect(Connections(10, 600.0), "a", [])
    server.data_received(b"GET /version HTTP/1.1\r\nhost: localhost\r\n")
    server._late()
    if came:
        server.data_received(came)
    while not wire.log:
        await asyncio.sleep(0)
    assert wire.sent().startswith(b"HTTP/1.1 200 " if came else b"HTTP/1.1 408 ")


@pytest.mark.parametrize("grace", [60.0, 0.0])
def test_a_body_that_came_during_a_standstill_is_not_late(
    grace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.server.exchange.GRACE_SECONDS", grace)

    async def receive() -> dict[str, Any]:
        for _ in range(100):  # its time is over, and it is there soon afterwards
            await asyncio.sleep(0)
        return {"type": "http.request", "body": b"whole"}

    async def send(_: Any) -> None: ...

    asked = Exchange({"method": "POST", "path": "/", "headers": []}, receive, send, plenty())
    if grace:
        assert asyncio.run(asked.body(100, 0.0)) == b"whole"
    else:
        with pytest.raises(ApiError, match="not complete"):
            asyncio.run(asked.body(100, 0.0))


def test_a_standstill_does_not_count_as_not_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at its readers an hour has passed for this process."""
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr("quire.server.context.time", types.SimpleNamespace(monotonic=lambda: next(hours)))
    passed: list[float] = []

    class Watch:
        def waiting(self, seconds: float) -> float:
            passed.append(seconds)
            return 0.0

    async def work() -> None:
        served = ServerContext(
            None, ServingConfig(reader_timeout=0.04), ServerMetrics(None), watches={Watch()}
        )  # type: ignore[arg-type]
        sweeping = asyncio.create_task(served.sweep())
        while len(passed) < 3:
            await asyncio.sleep(0.001)
        sweeping.cancel()

    asyncio.run(work())
    assert set(passed) == {0.02}
