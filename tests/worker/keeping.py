"""Blocks of known contents, kept in a tier and fetched from it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from quire.core.tier import Name
from quire.worker.kept_blocks import KeptBlocks
from quire.worker.kv_file import U8
from quire.worker.kv_server import BlockShelf, KvServer

BLOCK = 5000  # bytes
MARK = b"m" * 64  # fingerprint


def name_of(number: int) -> Name:
    return b"block %10d" % number, number % 3


def content_of(number: int) -> U8:
    return np.random.default_rng(number).integers(0, 256, BLOCK, dtype=np.uint8)


def keep(tier: KeptBlocks, *numbers: int) -> None:
    for number in numbers:
        wait(lambda: tier.room > 0)
        assert tier.reserve(name_of(number))
        tier.write(name_of(number), content_of(number))
    wait(lambda: not tier.writes)


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not until():
        assert time.monotonic() < end
        time.sleep(0.001)


def fetch(tier: KeptBlocks, *numbers: int) -> list[int]:
    """Read blocks; the numbers of those that came, each as it was kept."""
    for number in numbers:
        tier.read(number, name_of(number))
    came: dict[int, bool] = {}
    end = time.monotonic() + 120
    while len(came) < len({*numbers}):
        assert time.monotonic() < end
        for number, content in tier.arrived(64):
            came[number] = content is not None
            assert content is None or (content == content_of(number)).all()
        time.sleep(0.001)
    return sorted(number for number, there in came.items() if there)


@contextlib.contextmanager
def serving(key: bytes, tls: ssl.SSLContext | None = None, *, nixl: bool = False) -> Iterator[KvServer]:
    """A server of blocks in this process, at a free port."""
    server = KvServer(BlockShelf(2**20), key, socket.create_server(("127.0.0.1", 0)), tls, nixl=nixl)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()
        wait(lambda: server.connections == 0)
