"""Replicas behind one engine, for the time of a check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.front.replicated_engine import ReplicatedEngine
from quire.engine.front.serving_engine import serving_engine


def with_replicas(
    folder: Path,
    config: EngineConfig,
    check: Callable[[ReplicatedEngine], Coroutine[Any, Any, None]],
    serving: ServingConfig | None = None,
    *,
    in_process: bool = False,
) -> None:
    """Start them, run the check, and stop them."""

    async def run() -> None:
        engine = serving_engine(folder, config, serving, in_process=in_process)
        assert isinstance(engine, ReplicatedEngine)
        await engine.start()
        try:
            await check(engine)
        finally:
            await engine.stop(0.0)

    asyncio.run(run())
