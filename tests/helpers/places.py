"""Two places in networks of their own, with ways of several lengths: a router in front of their routers and servers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.far_places import FarPlaces, far_places
from helpers.unix_server import GUARD, _Connection, ask, until

NEAR, FAR = 0.005, 0.06  # seconds there, and as many back
SERVED = ["--served-model-name", "it", "--threads", "1", "--max-model-len", "2048", "--num-kv-blocks", "512"]


class Places:
    """A router in the hub, on a Unix socket, in front of the routers of two places, each in front of a server."""

    def __init__(
        self,
        networks: FarPlaces,
        folder: Path,
        models: list[Path],
        near: float,
        policy: str,
        stack: contextlib.ExitStack,
    ) -> None:
        self.path = folder / "socket"
        self.networks, self._stack = networks, stack
        entries = []
        self.servers = []
        for number, model in enumerate(models, 1):
            at = networks.addresses[number]
            self.servers.append(
                self._start(number, "serve", str(model), *SERVED, "--host", at, "--port", "8001")
            )
            self._start(number, "router", "--backend", f"http://{at}:8001", "--host", at, "--port", "8000")
            weight = near if number == 1 else 1.0
            entries.append(
                f'[[backend]]\nname = "place-{number}"\nurl = "http://{at}:8000"\nweight = {weight}\n'
            )
        file = folder / "places.toml"
        file.write_text("".join(entries))
        options = [
            "--health-timeout",
            "0.5",
            "--health-interval",
            "0.2",
            "--connect-timeout",
            "1",
            "--weights",
            "one",
            "--policy",
            policy,
        ]
        self._start(0, "router", "--backends-file", str(file), "--uds", str(self.path), *options)
        until(lambda: self.path.exists() and self.states() == ["ready", "ready"])

    def _start(self, number: int, *words: str) -> subprocess.Popen[bytes]:
        command = self.networks.inside(number, sys.executable, "-m", "quire", *words)
        process = subprocess.Popen(command, start_new_session=True)
        self._stack.callback(_end, process)
        return process

    def get(self, route: str) -> Any:
        """What the router says."""
        connection = _Connection(self.path)
        with contextlib.closing(connection):
            connection.request("GET", route)
            return json.loads(connection.getresponse().read())

    def states(self) -> list[str]:
        """What each place is doing, for the router."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return [each["state"] for each in self.get("/router/backends")["data"]]
        return []

    def asked(self) -> str:
        """The place that answers a request now."""
        response = ask(self.path, 2)
        assert response.status == 200, response.read()
        response.read()
        return str(response.getheader("x-quire-backend"))


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GUARD)


@contextlib.contextmanager
def two_places(
    folder: Path, models: list[Path], near: float = 1.0, policy: str = "prefix"
) -> Iterator[Places]:
    """The first one is near, and has that weight."""
    with far_places(NEAR, FAR) as networks, contextlib.ExitStack() as stack:
        yield Places(networks, folder, models, near, policy, stack)


def text_streamed(response: http.client.HTTPResponse, beginning: bytes = b"") -> str:
    """The text of a stream of completions, up to its end."""
    data = beginning + response.read()
    events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]", data[-500:]
    return "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1])
