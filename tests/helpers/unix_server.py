"""A server on a Unix socket, which is reached whatever networks there are, as its clients see it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GUARD = 240.0  # seconds after which waiting is given up; no test is decided by it


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
