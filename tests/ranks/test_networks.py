"""`quire serve` on two hosts with networks of their own: a cable that is pulled, and put back."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.rank_nodes import SECRET

GUARD = 300.0  # seconds after which waiting is given up; no test is decided by it


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable: 10.97.0.1 and 10.97.0.2; its ends are called wire."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    names = tuple(f"quire-{uuid.uuid4().hex[:8]}" for _ in range(2))
    try:
        for name in names:
            _ip("netns", "add", name)
        one, other = names
        _ip("link", "add", "wire", "netns", one, "type", "veth", "peer", "name", "wire", "netns", other)
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.97.0.{number}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _ip("-n", name, "link", "set", device, "up")
        yield one, other
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


class _Connection(http.client.HTTPConnection):
    """Over a Unix socket, which is reached from any network."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=GUARD)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(GUARD)
        self.sock.connect(str(self._path))


def ask(path: Path, tokens: int, *, stream: bool = False) -> http.client.HTTPResponse:
    body = {"prompt": "Once", "max_tokens": tokens, "temperature": 0, "stream": stream, "ignore_eos": True}
    connection = _Connection(path)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection.getresponse()


def text_of(path: Path) -> str:
    response = ask(path, 20)
    body: dict[str, Any] = json.loads(response.read())
    assert response.status == 200, body
    return str(body["choices"][0]["text"])


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def ready(path: Path) -> bool:
    connection = _Connection(path)
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    return False


@pytest.mark.ranks
def test_a_cable_that_is_pulled(hosts: tuple[str, str], tmp_path: Path) -> None:
    """The request that runs ends with an error, others are refused at once, and both work again with the cable."""
    path = tmp_path / "socket"
    options = ["--tensor-parallel-size", "2", "--max-model-len", "2048", "--num-kv-blocks", "512"]
    options += ["--threads", "1", "--nnodes", "2", "--master-addr", "10.97.0.1"]
    command = [sys.executable, "-m", "quire", "serve", "quire-mini", *options, "--uds", str(path)]
    env = {**os.environ, "QUIRE_RANK_SECRET": SECRET}
    with contextlib.ExitStack() as stack:
        started = []
        for node, name in enumerate(hosts):
            inside = ["ip", "netns", "exec", name, *command, "--node-rank", str(node)]
            process = stack.enter_context(subprocess.Popen(inside, env=env))
            stack.callback(process.kill)
            started.append(process)
        until(lambda: ready(path) or any(process.poll() is not None for process in started))
        text = text_of(path)
        response = ask(path, 1900, stream=True)
        assert response.readline().startswith(b"data: ")
        _ip("-n", hosts[1], "link", "set", "wire", "down")
        assert b'"error"' in response.read()
        refused = ask(path, 20)
        assert refused.status == 503
        assert refused.getheader("retry-after")
        refused.read()
        _ip("-n", hosts[1], "link", "set", "wire", "up")
        until(lambda: ready(path))
        assert text_of(path) == text
