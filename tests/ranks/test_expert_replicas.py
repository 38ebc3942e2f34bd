"""A server's replicas that share the experts of a model: equal answers, idle ones that come along, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine_async.running import ask, collect, until
from helpers.memory import memory_for_replicas
from helpers.rank_processes import COMMON, Wide, answers, answers_of_replicas, make
from helpers.replicated import with_replicas
from quire.config import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import EngineState, EngineUnavailableError
from quire.engine.front.replicated_engine import ReplicatedEngine
from quire.engine.host.replica_files import ReplicaFiles
from quire.types import SamplingParams

SHARED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)


def with_engine(
    folder: Path, check: Callable[[ReplicatedEngine], Coroutine[Any, Any, None]], *, in_process: bool = False,
    **more: Any,
) -> None:  # fmt: skip
    memory = memory_for_replicas(2**30) if in_process else 4 * 2**30
    config = EngineConfig(**(COMMON | {"memory": memory} | SHARED | more))
    with_replicas(folder, config, check, ServingConfig(engine_restarts=10), in_process=in_process)


async def text(engine: ReplicatedEngine, name: str, params: SamplingParams = SHORT) -> Any:
    return await collect(engine.generate(ask(name, params=params)))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        ("qwen3-moe", {"quantization": "int8"}, {}),
        ("qwen3-moe", {"dtype": "bfloat16"}, {"tensor_parallel_size": 2}),
        ("gpt-oss", {"dtype": "bfloat16"}, {"pipeline_parallel_size": 2}),
        ("deepseek3", {"dtype": "bfloat16"}, {}),  # whose first layer has none
        ("qwen3", {"dtype": "bfloat16"}, {}),  # nor has any of its layers
        ("qwen3", {"dtype": "bfloat16"}, {"pipeline_parallel_size": 2}),
    ],
)
def test_answers_are_those_of_one_process(
    wide: Wide, name: str, options: dict[str, Any], ranks: dict[str, Any]
) -> None:
    with make(wide(name), **options) as llm:
        alone = answers(llm)
    assert answers_of_replicas(wide(name), **options, **SHARED, **ranks) == alone


KILL = signal.SIGKILL, "killed by SIGKILL"
STOP = signal.SIGSTOP, "replica 1 does not answer"


@pytest.mark.parametrize(
    ("ranks", "levels", "deaths"),
    [
        ({}, (), [KILL]),
        pytest.param({}, (1, 2), [STOP, KILL], marks=pytest.mark.ranks),
        pytest.param({"tensor_parallel_size": 2}, (2,), [KILL, STOP], marks=pytest.mark.ranks),
        pytest.param({"pipeline_parallel_size": 2}, (), [KILL], marks=pytest.mark.ranks),
    ],
    ids=["one-rank", "sleeps", "two-ranks", "stages"],
)
def test_its_life(
    wide: Wide,
    caplog: pytest.LogCaptureFixture,
    ranks: dict[str, Any],
    levels: tuple[int, ...],
    deaths: list[tuple[signal.Signals, str]],
) -> None:
    """Idle replicas come to the steps of a busy one. One that is killed or hangs ends the requests of all, and all
    start again."""

    async def check(engine: ReplicatedEngine) -> None:
        first = await text(engine, "first")
        for number in range(3):  # one replica computes, the other comes along
            assert await text(engine, f"again{number}") == first
        await until(lambda: any(engine.stats.replica_wait_seconds))
        assert len(engine.stats.replica_wait_seconds) == len(engine._engines)
        assert sum(engine.stats.replica_wait_seconds) < engine.stats.step_seconds
        for level in levels:
            await engine.sleep(level, 5.0)
            assert engine.state is EngineState.SLEEPING
            await engine.wake()
            await until(lambda: engine.state is EngineState.READY)
            assert await text(engine, f"awake{level}") == first
        for number, reason in deaths:
            before = [each.restarts for each in engine._engines]
            streams = [engine.generate(ask(f"{reason}{n}", (70 + n, 80), LONG)) for n in range(4)]
            pid = engine._engines[1].pid
            assert pid is not None
            os.kill(pid, number)
            found = await asyncio.gather(*map(collect, streams), return_exceptions=True)
            assert all(isinstance(one, EngineUnavailableError) for one in found)
            with pytest.raises(EngineUnavailableError):  # none computes without the other
                engine.generate(ask("early"))
            await until(lambda: engine.state is EngineState.READY)
            assert [each.restarts for each in engine._engines] == [count + 1 for count in before]
            assert await text(engine, f"after {reason}") == first
            assert reason in caplog.text

    with_engine(wide("qwen3-moe"), check, **ranks)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of a step
def test_replicas_in_threads(wide: Wide, caplog: pytest.LogCaptureFixture) -> None:
    """An idle one notices that another has left, and so does one that computes."""

    async def ended(engine: ReplicatedEngine, requests: int) -> None:
        before = engine.stats.restarts
        streams = [engine.generate(ask(f"{n}", (70 + n, 80), LONG)) for n in range(requests)]
        engine._engines[1].kill("a test ends it")
        found = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert all(isinstance(one, EngineUnavailableError) for one in found)
        await until(lambda: engine.stats.restarts == before + 2 and engine.state is EngineState.READY)

    async def check(engine: ReplicatedEngine) -> None:
        first = await text(engine, "first")
        for requests in (0, 4):
            await ended(engine, requests)
            assert await text(engine, f"after {requests}") == first
        assert "its thread ended: another replica, which has a part of the experts, has left" in caplog.text

    with_engine(wide("qwen3-moe"), check, in_process=True)


def test_files_are_renewed_once_for_each_death() -> None:
    files = ReplicaFiles(2)
    one, other = files.join(0), files.join(1)
    assert one == other
    assert not files.left(0)
    first = os.stat(one).st_ino
    assert os.stat(files.join(0)).st_ino != first
    assert os.stat(one).st_ino == first  # the other one still has it
    assert files.behind(1)
    assert files.left(1)  # as the first has
    assert files.join(1) == files.join(0)
    assert not files.behind(1)
    files.close()


@pytest.mark.ranks
def test_one_hangs_and_another_dies(wide: Wide) -> None:
    async def check(engine: ReplicatedEngine) -> None:
        first = await text(engine, "first")
        pids = [each.pid or 0 for each in engine._engines]
        os.kill(pids[1], signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: all(each.restarts == 1 for each in engine._engines))
        await until(lambda: engine.state is EngineState.READY)
        assert await text(engine, "after") == first

    with_engine(wide("qwen3-moe"), check)


def test_an_end_with_requests(wide: Wide, caplog: pytest.LogCaptureFixture) -> None:
    """No replica is left in a step that others do not come to."""

    async def check(engine: ReplicatedEngine) -> None:
        streams = [engine.generate(ask(f"s{n}", (70 + n, 80), LONG)) for n in range(4)]
        await anext(aiter(streams[0]))

    with_engine(wide("qwen3-moe"), check)
    assert not caplog.records
