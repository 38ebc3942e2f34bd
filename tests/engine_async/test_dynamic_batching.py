"""Dynamic batching in the running engine: same tokens, in batches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine_async.running import ask, collect, run, running
from quire.config.schema import EngineConfig
from quire.types import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


def test_batches_give_the_same_tokens_and_every_request_is_served(tiny: Path) -> None:
    async def tokens(**config: object) -> list[list[int]]:
        async with running(tiny, **config) as engine:  # type: ignore[arg-type]
            streams = [engine.generate(ask(f"r{i}", (40 + i, 41, 42), PARAMS)) for i in range(5)]
            found = await asyncio.gather(*(collect(stream) for stream in streams))
            return [ids[0] for _, ids in found]

    async def work() -> None:
        plain = await tokens()
        assert await tokens(batching="dynamic", batch_wait_ms=20.0, max_num_seqs=2) == plain
        assert await tokens(batching="dynamic", batch_wait_ms=0.0, max_num_seqs=3) == plain

    run(work())


def test_waits_that_would_look_like_a_hang_are_refused() -> None:
    for wait in (-1.0, 5000.0, float("nan")):
        with pytest.raises(ValueError, match="batch_wait_ms"):
            EngineConfig(batching="dynamic", batch_wait_ms=wait)
