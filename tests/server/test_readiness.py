"""What the readiness probe says is what the next request gets, at every moment of an engine's life."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import EngineState, EngineUnavailableError, GenerateAsk
from quire.engine.front.async_engine import AsyncEngine
from quire.server.app import App
from quire.server.context import ServerContext
from quire.server.metrics import ServerMetrics
from quire.types import Request, SamplingParams, TokenIds

CHAT = b'{"prompt":[5,6],"max_tokens":1}'


async def ask(app: App, method: str, path: str, body: bytes = b"") -> int:
    """The status of an answer."""
    statuses: list[int] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "http_version": "1.1", "headers": headers}
    await app(scope, receive, send)
    return statuses[0]


class Life:
    """An engine that is watched: `look` compares, at one moment, what the probe says with what a request gets."""

    def __init__(self, folder: Path) -> None:
        config = ServingConfig(port=0, engine_restarts=1)
        self.engine = AsyncEngine(folder, EngineConfig(max_model_len=200, threads=1), config, in_process=True)
        self.app = App(ServerContext(self.engine, config, ServerMetrics(self.engine)))
        self.seen: list[EngineState] = []
        self._numbers = 0

    def taken(self) -> bool:
        self._numbers += 1
        request = Request(
            request_id=f"r{self._numbers}",
            prompt_token_ids=TokenIds([5]),
            params=SamplingParams(max_tokens=1),
        )
        try:
            self.engine.generate(GenerateAsk(request=request)).cancel()
        except EngineUnavailableError:
            return False
        return True

    async def look(self) -> bool:
        """Whether it is ready. Nothing happens between the two questions, so their answers must agree."""
        state = self.engine.state
        if not self.seen or self.seen[-1] is not state:
            self.seen.append(state)
        ready = await ask(self.app, "GET", "/health/ready") == 200  # it answers without waiting for anything
        assert ready is self.taken()
        assert ready is (await ask(self.app, "GET", "/v1/models") == 200)
        return ready

    async def watch(self, wanted: EngineState) -> None:
        while not await self.look() or self.engine.state is not wanted:
            if self.engine.state is wanted:
                return
            await asyncio.sleep(0)


@pytest.mark.parametrize("tokenizer_first", [True, False])
def test_ready_agrees_with_admission(
    folder: Path, tokenizer_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a start where the tokenizer is read before or after the weights, a death, a restart, and a shutdown."""
    go = threading.Event()
    opening = AsyncEngine._open

    def wait(self: AsyncEngine, *rest: Any) -> Any:
        if not tokenizer_first:
            go.wait()
        return opening(self, *rest)

    monkeypatch.setattr(AsyncEngine, "_open", wait)

    async def live() -> Life:
        life = Life(folder)
        assert not await life.look()
        starting = asyncio.create_task(life.engine.start())
        while not tokenizer_first and (
            life.engine._client is None or life.engine._client.state is not EngineState.READY
        ):
            assert not await life.look()
            await asyncio.sleep(0)
        for _ in range(100):
            if not tokenizer_first:
                assert not await life.look()  # the engine is ready; the tokenizer is not
            await asyncio.sleep(0)
        go.set()
        await life.watch(EngineState.READY)
        await starting
        assert await ask(life.app, "POST", "/v1/completions", CHAT) == 200
        assert life.engine._client is not None
        life.engine._client._supervisor._connection.host.kill()  # type: ignore[union-attr]
        await life.watch(EngineState.RESTARTING)
        await life.watch(EngineState.READY)
        assert await ask(life.app, "POST", "/v1/completions", CHAT) == 200
        stopping = asyncio.create_task(life.engine.stop(1.0))
        await life.watch(EngineState.DRAINING)
        while not stopping.done():
            assert not await life.look()
            await asyncio.sleep(0)
        assert await ask(life.app, "POST", "/v1/completions", CHAT) == 503
        return life

    async def work() -> Life:
        try:
            return await live()
        finally:
            go.set()

    life = asyncio.run(work())
    assert life.seen == [
        EngineState.STARTING, EngineState.READY, EngineState.RESTARTING, EngineState.READY, EngineState.DRAINING
    ]  # fmt: skip
