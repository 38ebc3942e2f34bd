"""Connections that a server closes while nobody asks it anything."""

from __future__ import annotations

import asyncio

from helpers.raw_server import RawServer, answer
from quire.util.http_client import Client, target


def test_one_that_is_being_closed_is_replaced() -> None:
    """Its end is seen a turn of the loop before the connection is lost; a request between is sent on a new one."""
    server = RawServer(answer(200, b"{}"))

    async def ask() -> tuple[int, int]:
        client = Client(target(server.url))
        assert (await client.get("/health"))[0] == 200
        (kept,) = client._idle
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
