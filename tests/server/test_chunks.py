"""Tokens of one step: all made, then all sent; several of one stream in one write."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from quire.server.protocol import Connections, LimitedProtocol


class Wire(asyncio.Transport):
    """Notes what is written, on a list that all wires share."""

    def __init__(self, name: str, log: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self.name, self.log, self.closing = name, log, False

    def write(self, data: Any) -> None:
        self.log.append((self.name, bytes(data)))

    def is_closing(self) -> bool:
        return self.closing


def connect(
    table: Connections, names: str, log: list[tuple[str, bytes]]
) -> list[tuple[LimitedProtocol, Wire]]:
    async def app(*_: Any) -> None: ...

    config = Config(app, interface="asgi3", log_config=None)
    config.load()
    pairs = []
    for name in names:
        protocol, wire = LimitedProtocol(table, config, ServerState(), {}), Wire(name, log)
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
            protocol._write_chunk(data)
    woken.set_result(None)  # a task that is woken afterwards sends afterwards
    wire.closing = True
    assert log == []
    await waiting
    both = b"5\r\nfirst\r\n6\r\nsecond\r\n"
    assert log == [("a", both), ("c", both), ("task", b"")]
    one._write_chunk(b"x" * 16)
    await asyncio.sleep(0)
    assert log[3:] == [("a", b"10\r\n" + b"x" * 16 + b"\r\n")]


def test_blocked_follows_the_transport() -> None:
    asyncio.run(follow())


async def follow() -> None:
    ((protocol, wire),) = connect(Connections(10, 10.0), "a", [])
    assert not protocol._blocked()
    protocol.pause_writing()
    assert protocol._blocked()
    protocol.resume_writing()
    assert not protocol._blocked()
    wire.closing = True
    assert protocol._blocked()
