"""The engine of a server: one, or several behind one front."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.front.async_engine import AsyncEngine, Progress
from quire.engine.host.spawn import Spawned

if TYPE_CHECKING:
    from quire.engine.front.replicated_engine import ReplicatedEngine


def serving_engine(
    model: str | Path,
    config: EngineConfig,
    serving: ServingConfig | None = None,
    *,
    in_process: bool = False,
    progress: Progress | None = None,
    spawned: Spawned | None = None,
) -> AsyncEngine | ReplicatedEngine:
    """The engine of a server: one, or with a `data_parallel_size` above 1 several."""
    make: type[AsyncEngine | ReplicatedEngine] = AsyncEngine
    if config.parallel.data_parallel_size > 1:  # one engine starts without what several need
        from quire.engine.front.replicated_engine import ReplicatedEngine

        make = ReplicatedEngine
    return make(model, config, serving, in_process=in_process, progress=progress, spawned=spawned)
