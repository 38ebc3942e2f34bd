"""The benchmark's client with a server in memory, on a virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

from helpers.fake_llm import FakeLLM
from helpers.virtual_time import VirtualLoop
from quire.util.http_client import Client, ClientConnection, target


class Pipe(asyncio.Transport):
    """A connection to a FakeLLM in memory. `pieces` cuts what the server writes, to try every boundary."""

    def __init__(self, connection: ClientConnection, server: FakeLLM, pieces: int = 0) -> None:
        super().__init__()
        self._connection, self._server, self._pieces = connection, server, pieces
        self._closed = False
        self.task: asyncio.Task[None] | None = None

    def write(self, data: Any) -> None:
        head, _, body = bytes(data).partition(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        self.task = asyncio.ensure_future(self._answer(method, path, body))

    async def _answer(self, method: str, path: str, body: bytes) -> None:
        for pause, data in self._server.respond(method, path, body):
            if pause:
                await asyncio.sleep(pause)
            if self._closed:
                return
            if not data:
                self.close()
                return
            size = self._pieces or len(data)
            for at in range(0, len(data), size):
                self._connection.data_received(data[at : at + size])

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)


class MemoryClient(Client):
    """The benchmark's client, with connections to a FakeLLM in memory and the loop's virtual clock."""

    def __init__(self, server: FakeLLM, loop: VirtualLoop, pieces: int = 0) -> None:
        super().__init__(target("http://fake"), loop.time)
        self._fake, self._pieces = server, pieces

    async def _open(self) -> ClientConnection:
        connection = ClientConnection(self.clock)
        connection.connection_made(Pipe(connection, self._fake, self._pieces))
        self.opened += 1
        return connection
