"""An engine for the length of a test, and how to wait for what it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from helpers.memory import memory_for
from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import GenerateAsk, Stream
from quire.engine.front.async_engine import AsyncEngine
from quire.engine.host.hosts import Host
from quire.types import Request, SamplingParams, TokenIds

GUARD = 300.0  # seconds after which a test that hangs is ended; no test is decided by time
ON_AND_ON = SamplingParams(temperature=0, max_tokens=60_000, ignore_eos=True)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test on a loop of its own."""

    async def guarded() -> None:
        async with asyncio.timeout(GUARD):
            await work

    asyncio.run(guarded())


@asynccontextmanager
async def running(
    folder: Path,
    *,
    in_process: bool = True,
    serving: ServingConfig | None = None,
    host: type[Host] | None = None,
    **config: Any,
) -> AsyncIterator[AsyncEngine]:
    weights = "auto" if list(folder.glob("*.safetensors")) else "random"
    config = {
        "memory": memory_for(2**30),
        "num_kv_blocks": 8192,
        "threads": 1,
        "load_format": weights,
    } | config
    engine = AsyncEngine(folder, EngineConfig(**config), serving, in_process=in_process)
    if host is not None:
        engine._new_host = host
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop(0)


def ask(
    name: str, prompt: Sequence[int] = (40, 41, 42), params: SamplingParams = ON_AND_ON, **more: Any
) -> GenerateAsk:
    """A request as a server makes it; an engine without eos ids never ends it early."""
    parts = {key: more.pop(key) for key in ("priority", "namespace", "eos_token_ids") if key in more}
    request = Request(
        request_id=name, prompt_token_ids=TokenIds(prompt), params=params, arrival=time.monotonic(), **parts
    )
    return GenerateAsk(request=request, **more)


async def collect(stream: Stream) -> tuple[list[str], list[list[int]]]:
    """Text and token ids of every sample, joined from the deltas."""
    texts = ["" for _ in stream.output.outputs]
    tokens: list[list[int]] = [[] for _ in stream.output.outputs]
    async for delta in stream:
        texts[delta.index] += delta.text
        tokens[delta.index] += delta.token_ids
    return texts, tokens


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something to become true; run() ends a test that waits in vain."""
    while not condition():
        await asyncio.sleep(0.01)
