"""A real server on a loopback port, and a small client that shows the bytes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop

from helpers.checkpoints import TinyModel
from helpers.tokenizers import save_whole
from quire.cli.serve import simulated
from quire.config import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import Engine, ModelCard
from quire.engine.front.serving_engine import serving_engine
from quire.learn.offered import offer
from quire.server.request_memory import RequestMemory
from quire.server.run import HttpServer, bind, bind_admin
from quire.server.service import Service

# Requests of max_tokens=60_000 run until the test has seen what it wants, however long that takes it.
ENDLESS: dict[str, Any] = {"max_model_len": 65_000}
PATIENT: dict[str, Any] = {"reader_tokens": 10**6, "reader_timeout": 600.0}
PROBES = (
    "/health",
    "/health/live",
    "/health/ready",
    "/v1/health",
    "/v2/health/live",
    "/v2/health/ready",
    "/ping",
)
GUARD = (
    240.0  # seconds after which waiting is given up, before pytest ends the worker; no test is decided by it
)


def served_folder(folder: Path) -> Path:
    """`folder`, now with a tiny Llama of a long context."""
    return save_whole(TinyModel("served", "LlamaConfig", {"max_position_embeddings": 65_536}), folder)


class LiveServer:
    """Serves a checkpoint from a thread of this process. Everything a client does goes through the socket."""

    def __init__(self, folder: Path, engine: dict[str, Any], serving: dict[str, Any]) -> None:
        self.config = ServingConfig(port=0, **serving)
        self.headers: dict[str, str] = {}  # of requests that have no others
        self._folder, self._engine_options = folder, engine
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._started.result(GUARD)

    def _run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            options = {"max_model_len": 200, "threads": 1} | self._engine_options
            self.engine = serving_engine(self._folder, EngineConfig(**options), self.config, in_process=True)
            offer(simulated)
            self.http = HttpServer(Service(self.engine, self.config), self.config)
            sock = bind(self.config)
            self.address = sock.getsockname()
            admin = bind_admin(self.config)
            self.admin_port = None if admin is None else admin.getsockname()[1]
            await self.http.start(sock, admin)
            await self.engine.start()
        except BaseException as error:
            self._started.set_exception(error)
            raise
        self._started.set_result(None)
        await self._stop.wait()
        await self.engine.stop(0.0)
        await self.http.stop()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(GUARD)
        assert not self._thread.is_alive()

    # ---- looking on

    host = "127.0.0.1"  # of the address that is called

    @property
    def port(self) -> int:
        return int(self.address[1])

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def idle(self) -> bool:
        """Nothing runs, nothing waits, and no block is held."""
        stats = self.engine.stats
        return stats.running == stats.waiting == stats.blocks_used == 0

    def wait(self, true: Callable[[], bool], seconds: float = GUARD) -> None:
        """Wait for something that must come; the time is only a bound for a failing test."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"not so after {seconds} s: {self.engine.stats}"
            time.sleep(0.01)

    # ---- calling

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """One request on a connection of its own. A body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=GUARD)
        with contextlib.closing(connection):
            sent = {"content-type": "application/json"} if body is not None else {}
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, sent | self.headers | (headers or {}))
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        return self.request("POST", path, body, headers)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return self.request("GET", path, headers=headers)

    def chat(self, text: str = "Hello", **fields: Any) -> Reply:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]} | fields)

    def complete(self, prompt: Any = "Hello", **fields: Any) -> Reply:
        return self.post("/v1/completions", {"prompt": prompt} | fields)

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection((self.host, self.port), timeout=GUARD)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over a metric's samples whose labels include the given ones, as of now."""
        total, found = 0.0, False
        with unittest.mock.patch("quire.server.exposition.CACHE_SECONDS", -1.0):
            text = self.get("/metrics").text
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total, found = total + float(value), True
        assert found, f"no metric {name} {labels}"
        return total

    def counted(self, number: float, name: str, **labels: str) -> None:
        """Wait for a metric to be `number`: a request is counted when its answer has gone out."""
        self.wait(lambda: self.metric(name, **labels) == number)

    @contextlib.contextmanager
    def busy(self, requests: int, headers: str = "", **fields: Any) -> Iterator[list[socket.socket]]:
        """Streamed requests that end when the context does. For a server made with ENDLESS and PATIENT."""
        body = {"prompt": "on", "max_tokens": 60_000, "ignore_eos": True, "stream": True} | fields
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(self.connect()) for _ in range(requests)]
            for sock in socks:
                sock.sendall(request_bytes("/v1/completions", body, headers=headers))
            self.wait(lambda: self.engine.stats.running + self.engine.stats.waiting >= requests)
            yield socks


@dataclass(frozen=True)
class Reply:
    """A response, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of the stream's events; the end mark as it is."""
        assert self.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in self.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]

    def error(self, status: int, code: str | None = None, param: str | None = None) -> str:
        """Check that this is an error of the one schema; its message."""
        assert self.status == status, (self.status, self.text[:500])
        assert len(self.body) <= 4096
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
        assert " at 0x" not in error["message"]
        if code is not None:
            assert error["code"] == code, error
        if param is not None:
            assert error["param"] == param, error
        return str(error["message"])


@dataclass
class _Planned:
    """As much of an engine as its memory for requests needs."""

    request_memory: int
    card: ModelCard = field(default_factory=lambda: ModelCard("m", "None", 2048, 50, "0" * 64, None, 0))


def plenty(size: int = 2**30) -> RequestMemory:
    """Memory for requests, without an engine."""
    return RequestMemory(cast(Engine, _Planned(size)), 100)


def request_bytes(path: str, body: Any, *, headers: str = "", version: str = "1.1") -> bytes:
    """A POST as it goes over the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return (head + f"content-length: {len(data)}\r\n{headers}\r\n").encode() + data


def read_all(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def stream_text(reply: Reply) -> dict[int, str]:
    """Text of each choice of a streamed chat or completion."""
    texts: dict[int, str] = {}
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


_NEIGHBOUR: dict[str, Any] = {
    "max_tokens": 120, "seed": 11, "temperature": 1.0, "ignore_eos": True, "stream": True
}  # fmt: skip


class Neighbour:
    """A client that asks the same again and again, and must get the same each time."""

    def __init__(self, server: LiveServer) -> None:
        self._server, self.rounds = server, 0
        self._expected = self._ask()
        self.differences: list[str] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _ask(self) -> str:
        reply = self._server.chat("What is next door?", **_NEIGHBOUR)
        while (
            reply.status == 429 and reply.json["error"]["code"] == "would_be_late"
        ):  # a test's deadline is kept first
            reply = self._server.chat("What is next door?", **_NEIGHBOUR)
        assert reply.status == 200, reply.text
        return stream_text(reply)[0]

    def _run(self) -> None:
        while not self._stopping:
            try:
                text = self._ask()
            except Exception as error:  # anything that happens to a neighbour is a finding
                text = repr(error)
            self.rounds += 1
            if text != self._expected:
                self.differences.append(text)

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(GUARD)


@contextlib.contextmanager
def serving(folder: Path, engine: dict[str, Any] | None = None, **options: Any) -> Iterator[LiveServer]:
    """A server for the length of a context."""
    server = LiveServer(folder, engine or {}, options)
    try:
        yield server
    finally:
        server.close()
