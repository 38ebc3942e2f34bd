"""A server's engine of several ranks: one that dies or hangs ends them all, with its reason, and they start again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from engine_async.running import ask, collect, run, running, until
from quire.config.shipped import shipped_models
from quire.engine.api import EngineState, EngineUnavailableError
from quire.engine.front.async_engine import AsyncEngine
from quire.types import SamplingParams
from quire.util.platform import started_by

LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def ranks_of(engine: AsyncEngine) -> list[int]:
    """The processes that the engine's process has started."""
    assert engine.pid is not None
    return started_by(engine.pid)


def children(pid: int) -> set[int]:
    """The processes that any thread of a process has started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(found) for each in lists for found in each.read_text().split()}


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("victim", "number", "reason"),
    [
        ("rank", signal.SIGKILL, "rank 1 of 2 was killed by SIGKILL"),
        pytest.param("rank", signal.SIGSTOP, "rank 1 of 2 does not answer", marks=pytest.mark.ranks),
        pytest.param("engine", signal.SIGKILL, "killed by SIGKILL", marks=pytest.mark.ranks),
    ],
)
def test_all_ranks_end_and_start_again(
    caplog: pytest.LogCaptureFixture, victim: str, number: signal.Signals, reason: str
) -> None:
    async def work() -> None:
        folder = shipped_models()["quire-mini"]
        async with running(folder, in_process=False, tensor_parallel_size=2, num_kv_blocks=1024) as engine:
            text = (await collect(engine.generate(ask("before", params=SHORT))))[0]
            await engine.sleep(1, 5.0)
            await engine.wake()
            assert (await collect(engine.generate(ask("awake", params=SHORT))))[0] == text
            (rank,) = ranks_of(engine)
            first = engine.pid
            assert first is not None
            streams = [engine.generate(ask(f"r{i}", params=LONG)) for i in range(3)]
            await anext(aiter(streams[0]))
            os.kill(rank if victim == "rank" else first, number)
            for stream in streams:
                with pytest.raises(EngineUnavailableError, match="ended unexpectedly"):
                    await collect(stream)
            await until(lambda: engine.state is EngineState.READY)
            assert (await collect(engine.generate(ask("after", params=SHORT))))[0] == text
            await until(lambda: gone(first) and gone(rank))
            (rank,) = ranks_of(engine)
        await until(lambda: gone(rank))
        assert reason in caplog.text

    run(work())


@pytest.mark.ranks
@pytest.mark.parametrize("in_process", [False, True])
def test_an_idle_rank_that_dies_is_replaced(in_process: bool) -> None:
    async def work() -> None:
        folder, others = shipped_models()["quire-mini"], children(os.getpid())
        async with running(
            folder, in_process=in_process, pipeline_parallel_size=2, num_kv_blocks=1024
        ) as engine:
            (rank,) = children(engine.pid or os.getpid()) - others
            os.kill(rank, signal.SIGKILL)
            await until(lambda: engine.stats.restarts == 1 and engine.state is EngineState.READY)
            await collect(engine.generate(ask("after", params=SHORT)))

    run(work())
