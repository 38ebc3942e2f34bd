"""Tokens of one step: all made, then all sent; several of one stream in one write."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from quire.server.protocol import Connections, LimitedProtocol


class Wire(asyncio.Transport):
    """Notes what is written, on a list that all wires share."""

    def __init__(self, name: str, log: list[tuple[str, bytes]], extra: dict[str, Any] | None = None) -> None:
        super().__init__(extra)
        self.name, self.log, self.closing, self.buffered = name, log, False, 0

    def write(self, data: Any) -> None:
        self.log.append((self.name, bytes(data)))

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def is_closing(self) -> bool:
        return self.closing


def connect(
    table: Connections, names: str, log: list[tuple[str, bytes]], extra: dict[str, Any] | None = None
) -> list[tuple[LimitedProtocol, Wire]]:
    async def app(*_: Any) -> None: ...

    config = Config(app, interface="asgi3", log_config=None)
    config.load()
    pairs = []
    for name in names:
        protocol, wire = LimitedProtocol(table, config, ServerState(), {}), Wire(name, log, extra)
        protocol.connection_made(wire)
        pairs.append((protocol, wire))
    return pairs


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
