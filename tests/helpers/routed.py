"""A router in this process, in front of servers of known latencies."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.fake_llm import Behaviour, FakeLLM, Socket
from helpers.server import GUARD, Reply
from quire.config.routing import RouterConfig
from quire.config.serving import ServingConfig
from quire.router.backends import Backends
from quire.router.router_service import RouterService
from quire.server.run import HttpServer, bind


class Routed:
    """A router and its servers, whose loop runs in a thread."""

    def __init__(
        self,
        behaviours: list[Behaviour | FakeLLM],
        urls: list[str],
        routing: dict[str, Any],
        serving: dict[str, Any],
    ) -> None:
        self._urls = urls
        self.fakes = [FakeLLM(each) if isinstance(each, Behaviour) else each for each in behaviours]
        self.listeners: list[asyncio.Server] = []
        self.ports: list[int] = []
        self._rules: str | None = routing.pop("rules", None)
        self._routing, self._serving = routing, serving
        self.loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_loop, daemon=True)

    def __enter__(self) -> Routed:
        self._thread.start()
        assert self._ready.wait(GUARD)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(GUARD)
        assert not self._thread.is_alive()

    def _run_loop(self) -> None:
        try:
            self.loop.run_until_complete(self._run())
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ready.set()

    async def _run(self) -> None:
        for fake in self.fakes:
            listener = await self.loop.create_server(lambda fake=fake: Socket(fake), "127.0.0.1", 0)  # type: ignore[misc]
            self.listeners.append(listener)
            self.ports.append(listener.sockets[0].getsockname()[1])
        urls = (*self._urls, *(f"http://127.0.0.1:{port}" for port in self.ports))
        config = ServingConfig(port=0, quiet=True, **self._serving)
        with tempfile.TemporaryDirectory() as folder:
            if self._rules is not None:  # each server has a model of its own: a, b, c
                file = Path(folder) / "backends.toml"
                file.write_text(self._rules + "".join(
                    f'[[backend]]\nurl = "{url}"\nname = "of-{model}"\nmodels = ["{model}"]\n'
                    for url, model in zip(urls, "abc", strict=False)
                ))  # fmt: skip
                urls, self._routing["backends_file"] = (), str(file)
            self.backends = Backends(
                RouterConfig(backend=urls, **({"health_interval": 0.05} | self._routing))
            )
        self.service = RouterService(self.backends, config)
        sock = bind(config)
        self.port = sock.getsockname()[1]
        server = HttpServer(self.service, config)
        await server.start(sock)
        await self.backends.start()
        self._ready.set()
        await self._ended.wait()
        await self.backends.stop(0.0)
        await server.stop()
        for listener in self.listeners:
            listener.close()
        sock.close()

    def do(self, work: Callable[[], Any]) -> Any:
        """Run something in the router's loop."""
        done = threading.Event()
        found: list[Any] = []

        def now() -> None:
            found.append(work())
            done.set()

        self.loop.call_soon_threadsafe(now)
        assert done.wait(GUARD)
        return found[0]

    def lose(self, number: int) -> None:
        """A server is gone: nobody listens at its address, and it hangs up."""

        def go() -> None:
            fake = self.fakes[number]
            self.listeners[number].close()
            fake.gone = True
            for each in [*fake.links]:
                each.abort()

        self.do(go)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GUARD)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            text = b""
            with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
                while piece := response.read1():
                    text += piece
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, text)

    def chat(self, text: str, *, tokens: int = 4, **fields: Any) -> Reply:
        """A chat of one message."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, **fields}
        return self.request("POST", "/v1/chat/completions", body)


def routed(
    *behaviours: Behaviour | FakeLLM,
    urls: list[str] | None = None,
    serving: dict[str, Any] | None = None,
    **routing: Any,
) -> Routed:
    """A router in front of the servers at `urls`, and of one of each behaviour, or of those given; with `rules`, text
    of the file of servers, these have the models a, b and c."""
    return Routed(list(behaviours), urls or [], routing, serving or {})
