"""Ranks on several "hosts" of this machine: they meet at a loopback address, and a process follows for each."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.config.launched import variables_of

SECRET = "sixteen bytes or more"
# What `quire serve … --node-rank N` does, with options as they are.
_FOLLOW = """
import json, os, sys
from quire.config.launched import launched
from quire.config.schema import EngineConfig
from quire.engine.build.following_node import follow_node
config = EngineConfig(**json.loads(sys.argv[2]))
follow_node(launched(os.environ, config.parallel.ranks), sys.argv[1], config)
"""


def fresh_address() -> str:
    """One of the sixteen million addresses of the loopback: nobody else listens there."""
    first, second, third = uuid.uuid4().bytes[:3]
    return f"127.{first}.{second}.{third % 254 + 1}"


def environment(address: str, nodes: int, node: int = 0) -> dict[str, str]:
    """What a launcher sets for a node."""
    return {**variables_of(nodes, node, address, None), "QUIRE_RANK_SECRET": SECRET}


@contextmanager
def following(
    folder: Path | str, address: str, nodes: int, options: Mapping[str, Any], **variables: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of all nodes but the first, which join it at this address; they are ended at the end."""
    command = [sys.executable, "-c", _FOLLOW, str(folder), json.dumps(dict(options))]
    started = []
    try:
        for node in range(1, nodes):
            env = {**os.environ, **environment(address, nodes, node), **variables}
            started.append(subprocess.Popen(command, env=env))
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait(30)


class Relay:
    """A wire between hosts: what comes to `address` goes on to another one, later and in other pieces; or nowhere while
    it is `cut`."""

    def __init__(self, to: str, port: int, seconds: float, seed: int = 0) -> None:
        self.address, self._to, self._seconds = fresh_address(), (to, port), seconds
        self.cut = threading.Event()
        self._chance = random.Random(seed)
        self._listener = socket.create_server((self.address, port))
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._to)
            except ConnectionRefusedError:
                here.close()
                continue
            except OSError:
                return
            self._sockets += [here, there]
            for one, other in ((here, there), (there, here)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(self._chance.choice([7, 1000, 2**16])):
                time.sleep(self._chance.uniform(0, self._seconds))
                if self.cut.is_set():
                    return  # and the connection stays as it is
                other.sendall(data)
            if not self.cut.is_set():  # an end does not come through, either
                other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        for each in self._sockets:
            each.close()
