"""Connections that are kept: what a request on one waits for, and those that a server closes while nobody asks."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from helpers.fake_llm import Behaviour
from helpers.raw_server import RawServer, answer
from helpers.routed import routed
from quire.util.http_client import Client, ClientConnection, Whole, target

HEAD = b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n"


async def kept_one(client: Client) -> ClientConnection:
    """The connection that a client keeps after a request."""
    assert (await client.get("/health"))[0] == 200
    (kept,) = client._idle
    return kept


def test_one_that_is_being_closed_is_replaced() -> None:
    """Its end is seen a turn of the loop before the connection is lost; a request between is sent on a new one."""
    server = RawServer(answer(200, b"{}"))

    async def ask() -> tuple[int, int]:
        client = Client(target(server.url))
        kept = await kept_one(client)
        assert kept._transport is not None
        kept._transport.close()
        assert kept.usable
        status, _ = await client.get("/health")
        await client.close()
        return status, client.opened

    try:
        assert asyncio.run(ask()) == (200, 2)
    finally:
        server.close()


def test_the_kernel_asks_whether_a_server_is_there() -> None:
    """One that was started again while the way to it was cut says nothing of a stream that it does not know."""
    server = RawServer(answer(200, b"{}"))

    async def asks() -> int:
        client = Client(target(server.url))
        kept = await kept_one(client)
        assert kept._transport is not None
        found: int = kept._transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_KEEPALIVE
        )
        await client.close()
        return found

    try:
        assert asyncio.run(asks()) == 1
    finally:
        server.close()


def test_a_request_on_one_is_sent_before_its_task_runs() -> None:
    """A task that is cancelled before leaves no connection on which an answer comes that nobody takes."""
    server = RawServer(answer(200, b"{}"))
    taken: list[ClientConnection] = []

    async def ask() -> None:
        client, found = Client(target(server.url)), Whole()
        kept = await kept_one(client)
        task = client.requested(HEAD, b"", found, taken.append)
        assert taken == [kept]
        assert kept._done is not None, "it is on its way"
        await task
        assert (found.status, client._idle, client.opened) == (200, [kept], 1)

        task = client.requested(HEAD, b"", Whole(), taken.append)
        task.cancel()
        await asyncio.wait([task])
        assert not kept.is_open
        assert (await client.get("/health"))[0] == 200
        assert client.opened == 2
        await client.close()

    try:
        asyncio.run(ask())
    finally:
        server.close()


def test_one_that_was_lost_meanwhile_is_replaced_once() -> None:
    """What was sent on it is sent again on a new one; where nobody listens any more, the first may have brought it."""
    server = RawServer(answer(200, b"{}"))

    async def ask() -> None:
        client, found = Client(target(server.url)), Whole()
        kept = await kept_one(client)
        task = client.requested(HEAD, b"", found, taken.append)
        kept.connection_lost(None)
        await task
        assert (found.status, client.opened, len(taken)) == (200, 2, 2)
        await client.close()

    taken: list[ClientConnection] = []
    try:
        asyncio.run(ask())
    finally:
        server.close()


def test_the_head_of_an_answer_and_its_beginning_are_one_packet() -> None:
    with (
        routed(Behaviour()) as router,
        contextlib.closing(socket.create_connection(("127.0.0.1", router.port))) as sock,
    ):
        for path in ("/health", "/nothing"):
            sock.sendall(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path.encode())
            head, _, body = sock.recv(2**16).partition(b"\r\n\r\n")
            assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
        sock.sendall(b"HEAD /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert sock.recv(2**16).endswith(b"\r\n\r\n")
