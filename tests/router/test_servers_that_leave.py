"""Requests that meet a server while it ends: none is lost that another server, or the next one there, could answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from helpers.fake_llm import Behaviour, FakeLLM, Socket, whole
from helpers.process import until
from helpers.routed import Routed, routed
from helpers.server import GUARD
from quire.config.routing import BackendEntry, RouterConfig
from quire.router.backend_server import BackendServer
from quire.router.relay import FromServer
from quire.util.http_client import Client, ClientError, UnreachedError, target

FAST = Behaviour(ttft=0.0, itl=0.0)
CONFIG = RouterConfig(backend=("http://127.0.0.1:9",))
NEVER = 3600.0  # seconds
FROZEN: dict[str, Any] = {"policy": "round-robin", "health_timeout": 0.1, "hold_seconds": NEVER}
BUSY = whole(503, {"error": {"message": "the server is shutting down", "code": "engine_unavailable"}})


class Ending(FakeLLM):
    """A server that meets each request with the next of `steps`: "drain" refuses it, "hang up" closes its connection,
    "serve" answers. It says that it is well for as long as it is there, if `late` once that is set."""

    def __init__(self, *steps: str, late: asyncio.Event | None = None) -> None:
        super().__init__(FAST)
        self.steps, self.late = [*steps], late
        self.asked = 0  # for its health

    def respond(self, method: str, path: str, body: bytes) -> Iterator[tuple[float, bytes]]:
        self.asked += method == "GET"
        step = self.steps.pop(0) if method == "POST" and self.steps else "serve"
        if step == "serve":
            yield from super().respond(method, path, body)
            return
        self.seen.append((path, {}))
        yield 0.0, BUSY if step == "drain" else b""


class EndingSocket(Socket):
    async def answer(self, method: str, path: str, body: bytes) -> None:
        late = self.server.late  # type: ignore[attr-defined]
        if late is not None and method == "GET":
            self.server.asked += 1  # type: ignore[attr-defined]
            await late.wait()
        await super().answer(method, path, body)


class Place:
    """An address at which servers come and go."""

    def __init__(self, router: Routed, port: int) -> None:
        self._router, self._port = router, port
        self._listener: asyncio.Server | None = None
        self._server: Ending | None = None

    def comes(self, server: Ending) -> None:
        """It listens from now on."""

        async def listen() -> None:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(lambda: EndingSocket(server), "127.0.0.1", self._port)
            self._server = server

        asyncio.run_coroutine_threadsafe(listen(), self._router.loop).result(GUARD)

    def goes(self, *, hangs_up: bool = True) -> None:
        """Nobody listens from now on."""

        def close() -> None:
            assert self._listener is not None
            assert self._server is not None
            self._listener.close()
            self._server.gone = hangs_up
            for each in [*self._server.links] if hangs_up else ():
                each.close()

        self._router.do(close)


@contextmanager
def free_port() -> Iterator[int]:
    """A port at which nobody listens but who is told it: it is bound meanwhile."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@contextmanager
def one_place(**routing: Any) -> Iterator[tuple[Routed, Place]]:
    """A router whose only server was seen well, and is looked at again only when a request waits."""
    with (
        free_port() as port,
        routed(urls=[f"http://127.0.0.1:{port}"], **({"health_interval": NEVER} | routing)) as router,
    ):
        yield router, Place(router, port)


def seen_well(router: Routed) -> None:
    """The router believes that all its servers can be asked."""

    async def check() -> None:
        await asyncio.gather(*(each.check() for each in router.backends.all))

    asyncio.run_coroutine_threadsafe(check(), router.loop).result()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "steps", [(), ("drain",), ("hang up",), ("drain", "hang up"), ("hang up", "drain", "drain")]
)
def test_a_request_waits_for_the_next_server(steps: tuple[str, ...], stream: bool) -> None:
    """Refused while the server drains, hung up on before a byte of an answer, or not listened to: in any order."""
    with one_place(hold_seconds=NEVER, retries=1000) as (router, place), ThreadPoolExecutor(1) as clients:
        old, new = Ending(*steps, *["drain"] * 1000), Ending()
        place.comes(old)
        seen_well(router)
        if not steps:
            place.goes()
        asked = clients.submit(router.chat, "hello", stream=stream)
        until(lambda: router.backends.held == 1 and len(old.seen) >= len(steps))
        if steps:
            place.goes()
        place.comes(new)
        reply = asked.result()
        assert (reply.status, len(new.seen)) == (200, 1)
        until(lambda: (router.backends.held, router.backends.running) == (0, 0))


def test_a_check_from_before_says_nothing() -> None:
    """The answer to a check that began while the server was there comes when it has gone."""
    with one_place(hold_seconds=NEVER) as (router, place), ThreadPoolExecutor(1) as clients:
        first = Ending()
        place.comes(first)
        seen_well(router)
        late = router.do(asyncio.Event)
        first.late, first.asked = late, 0
        checked = asyncio.run_coroutine_threadsafe(router.backends.all[0].check(), router.loop)
        until(lambda: first.asked == 1)
        place.goes(hangs_up=False)
        asked = clients.submit(router.chat, "hello")
        until(lambda: router.backends.held == 1 and not router.backends.all[0].healthy)
        router.do(late.set)
        checked.result()
        assert not router.backends.all[0].healthy
        place.comes(Ending())
        assert asked.result().status == 200


def test_a_request_that_ends_servers_does_not_end_all() -> None:
    """What hangs up on it is well otherwise: it is asked once, and once more as often as anything is retried."""
    with one_place(hold_seconds=NEVER, retries=1) as (router, place):
        server = Ending(*["hang up"] * 100)
        place.comes(server)
        seen_well(router)
        assert router.chat("hello").status == 502
        assert len(server.seen) == 6, (
            "each time also on a new connection, as the kept one may have been closed before"
        )


def test_servers_that_are_not_there_do_not_count_as_tried() -> None:
    """They know nothing of the request, and are down from then on."""
    with ExitStack() as stack:
        dead = [f"http://127.0.0.1:{stack.enter_context(free_port())}" for _ in range(5)]
        options: dict[str, Any] = {"retries": 0, "health_interval": NEVER, "policy": "round-robin"}
        router = stack.enter_context(routed(FAST, urls=dead, **options))
        for each in router.backends.all:
            each.healthy = True
        assert {router.chat("hello").status for _ in range(3)} == {200}
        assert [each.healthy for each in router.backends.all] == [False] * 5 + [True]


def test_a_server_that_hangs_holds_up_no_check() -> None:
    """It takes connections and says nothing; another one is found all the same."""
    with socket.create_server(("127.0.0.1", 0)) as silent, free_port() as port:
        urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{silent.getsockname()[1]}"]
        with (
            routed(urls=urls, hold_seconds=NEVER, health_timeout=0.2, health_interval=NEVER) as router,
            ThreadPoolExecutor(1) as clients,
        ):
            object.__setattr__(router.backends.config, "health_timeout", NEVER)
            asked = clients.submit(router.chat, "hello")
            until(lambda: router.backends.held == 1)
            Place(router, port).comes(Ending())
            assert asked.result().status == 200


def test_a_stream_waits_for_its_server() -> None:
    """The only one that there is hangs up in the middle of a stream, and is there again: it goes on."""
    with routed(Behaviour(ttft=0.0, itl=0.0, cut={0}), hold_seconds=NEVER) as router:
        reply = router.chat("hello", stream=True, tokens=8)
        assert reply.text.endswith("data: [DONE]\n\n")
        assert reply.text.count(" word") == 8
        assert "quire_router_resumed_total 1.0" in router.request("GET", "/metrics").text


class Freezing(FakeLLM):
    """A server that stops in the middle of its first answer, or before it, and says nothing more, not to checks either,
    though its connections stay."""

    def __init__(self, after: int) -> None:
        super().__init__(Behaviour(ttft=0.0, itl=0.01))
        self._after, self.frozen = after, False

    def respond(self, method: str, path: str, body: bytes) -> Iterator[tuple[float, bytes]]:
        for number, (pause, data) in enumerate(super().respond(method, path, body)):
            self.frozen = self.frozen or (method == "POST" and number == self._after)
            yield (NEVER if self.frozen else pause), data


@pytest.mark.parametrize("after", [0, 4])
def test_a_server_that_falls_silent_is_lost(after: int) -> None:
    """Nothing is closed: a request that it has not begun to answer goes elsewhere, and a stream goes on there."""
    frozen = Freezing(after)
    with routed(frozen, Behaviour(ttft=0.0, itl=0.0), **FROZEN) as router:
        reply = router.chat("hello", stream=True, tokens=8)
        assert frozen.frozen
        assert (reply.status, reply.text.count(" word")) == (200, 8)
        assert reply.text.endswith("data: [DONE]\n\n")


def test_who_is_not_read_is_not_silent() -> None:
    """What has come lately, or is held back for a slow client, is not given up; nor is anything without connection."""

    class Given:
        def __init__(self) -> None:
            self.whys: list[str] = []

        def give_up(self, why: str) -> None:
            self.whys.append(why)

        def pause(self) -> None: ...

        def resume(self) -> None: ...

    given, read = Given(), FromServer()
    read.give_up(0.0)
    read.take(given)  # type: ignore[arg-type]
    read.give_up(NEVER)
    read._pause()
    read.give_up(0.0)
    assert not given.whys
    read._resume()
    read.give_up(NEVER)
    assert not given.whys
    read.give_up(0.0)
    assert len(given.whys) == 1


class Checked:
    """An answer that is being read; how often it was given up."""

    def __init__(self) -> None:
        self.given_up = 0

    def give_up(self, seconds: float) -> None:
        self.given_up += 1


@pytest.mark.parametrize(
    ("error", "silent"),
    [
        (TimeoutError(), True),
        (UnreachedError("connect: refused", refused=True), True),
        (UnreachedError("connect: no answer", silent=True), True),
        (UnreachedError("connect: Too many open files"), False),
        (UnreachedError("connect: Name or service not known"), False),
        (ClientError("bad answer: no HTTP"), False),
    ],
)
def test_one_late_check_or_a_fault_of_this_machine_is_no_silence(error: Exception, silent: bool) -> None:
    """Three checks in a row without an answer from there are."""

    async def failing(path: str, sent: Any) -> tuple[int, bytes]:
        raise error

    async def well(path: str, sent: Any) -> tuple[int, bytes]:
        sent(0.0)
        return 200, b"{}"

    async def check() -> None:
        server = BackendServer(BackendEntry("http://127.0.0.1:9", "one", models=("m",)), CONFIG)
        reading = Checked()
        server.reading.add(reading)  # type: ignore[arg-type]
        for get in (failing, failing, well, failing, failing):
            server.client.get = get  # type: ignore[assignment]
            await server.check()
        assert not reading.given_up
        await server.check()
        assert reading.given_up == silent

    asyncio.run(check())


def test_faults_of_this_machine_are_told_from_silence() -> None:
    async def connect(url: str) -> UnreachedError:
        client = Client(target(url), connect_timeout=5.0)
        with pytest.raises(UnreachedError) as caught:
            await client.get("/health")
        return caught.value

    with free_port() as port:
        refused = asyncio.run(connect(f"http://127.0.0.1:{port}"))
    assert (refused.refused, refused.silent) == (True, True)
    unknown = asyncio.run(connect("http://no-such-host.invalid:80"))
    assert (unknown.refused, unknown.silent) == (False, False)


def test_a_busy_server_is_not_far() -> None:
    """Of many checks the quickest one counts: the others have the time of the server in them."""
    server = BackendServer(BackendEntry("http://127.0.0.1:9", "one"), CONFIG)
    server._round_trips.extend([0.001, *[0.05] * 50])
    assert server.round_trip == 0.0
    server._round_trips.extend([0.05] * 60)
    assert server.round_trip == 0.05
