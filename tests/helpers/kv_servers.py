"""Servers of KV blocks: a `quire kv-server` of its own, and one in this process."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

from helpers.server import GUARD
from quire.worker.kv_server import BlockShelf, KvServer

S = TypeVar("S", bound=KvServer)


class ServerHere(Generic[S]):
    """A server in this process, which can be ended and started again at its address, with nothing in it."""

    server: S

    def __init__(self, kind: type[S], key: bytes, size: int) -> None:
        self.kind, self.key, self.size = kind, key, size
        self._holder = (
            socket.socket()
        )  # nobody else gets the port meanwhile: it is bound, and does not listen
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.port = self._holder.getsockname()[1]
        self.start()

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))  # with SO_REUSEADDR
        self.server = self.kind(BlockShelf(self.size), self.key, listener)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.server.close()
        self._thread.join(GUARD)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """Stop, and let others have the port."""
        self.stop()
        self._holder.close()


@contextlib.contextmanager
def kv_server(key: Path, port: int = 0, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process, with further options, and its port."""
    command = [
        sys.executable,
        "-m",
        "quire.cli.main",
        "kv-server",
        "--key-file",
        str(key),
        "--port",
        str(port),
    ]
    process = subprocess.Popen([*command, "--size", "256MiB", *options], stderr=subprocess.PIPE, text=True)
    guard = threading.Timer(GUARD, process.kill)
    guard.start()
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        guard.cancel()
        found = re.fullmatch(
            r"quire: keeping KV blocks in 256(\.0+)? MiB at 127\.0\.0\.1:(\d+)(?: and (\S+))?\n", line
        )
        assert found, line
        assert found[3] is None or found[3] in options, line
        yield process, int(found[2])
    finally:
        guard.cancel()
        process.kill()
        process.communicate()
