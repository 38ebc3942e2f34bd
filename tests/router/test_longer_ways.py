"""How far a server is: the shortest of its checks, which a busy server does not change, and a longer way does soon."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from helpers.server import GUARD
from quire.config.routing import BackendEntry, RouterConfig
from quire.router.backend_server import BackendServer
from quire.util.http_client import Client, ClientError, UnreachedError, target

URL = "http://127.0.0.1:1"


class Way:
    """In place of a client: checks and handshakes that take so long, on a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.check = self.kernel = 0.001
        self.fails = False
        self.handshakes = 0

    def clock(self) -> float:
        return self.now

    async def get(self, path: str, sent: Callable[[float], None] = lambda _: None) -> tuple[int, bytes]:
        sent(self.now)
        self.now += self.check
        return 200, b'{"data": []}' if path == "/v1/models" else b"{}"

    async def handshake(self, seconds: float) -> float:
        self.handshakes += 1
        if self.fails:
            raise UnreachedError("connect: no answer")
        return self.kernel


@pytest.fixture
def way() -> Way:
    return Way()


@pytest.fixture
def server(way: Way) -> BackendServer:
    made = BackendServer(BackendEntry(URL, "one"), RouterConfig(backend=(URL,)))
    made.client = way  # type: ignore[assignment]
    return made


def check(server: BackendServer, times: int) -> None:
    async def checks() -> None:
        for _ in range(times):
            await server.check()

    asyncio.run(checks())
    assert server.healthy


def test_a_busy_server_is_no_far_one(server: BackendServer, way: Way) -> None:
    """Its kernel answers as soon as ever. Who answers in time is asked for no handshake."""
    check(server, 5)
    assert way.handshakes == 0
    way.check = 0.2
    check(server, 50)
    assert server.round_trip == 0.0
    assert way.handshakes == 50
    way.fails = True
    check(server, 4)
    assert server.round_trip == 0.0


def test_a_longer_way_is_noticed_after_three_checks(server: BackendServer, way: Way) -> None:
    check(server, 5)
    way.check = way.kernel = 0.12
    check(server, 2)
    assert server.round_trip == 0.0
    way.kernel = 0.001
    check(server, 1)
    way.kernel = 0.12
    check(server, 2)
    assert server.round_trip == 0.0, "three in a row"
    check(server, 1)
    assert server.round_trip == pytest.approx(0.12)
    way.check = way.kernel = 0.3
    check(server, 3)
    assert server.round_trip == pytest.approx(0.3)
    way.check = way.kernel = 0.001
    check(server, 1)
    assert server.round_trip == 0.0, "a shorter one at once"


def test_a_handshake_is_a_connection_without_a_request() -> None:
    async def took(url: str) -> float:
        return await Client(target(url)).handshake(GUARD)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert asyncio.run(took(url)) >= 0
        listener.settimeout(GUARD)
        for _ in range(2):
            sock, _ = listener.accept()
            with sock:
                assert sock.recv(1) == b""
    with pytest.raises(ClientError, match="connect: "):
        asyncio.run(took(url))
