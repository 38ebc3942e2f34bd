"""Several replicas of a model behind one front: equal answers, cached prefixes found again, faults that stay alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.low_rank import random_adapter, write_adapter
from helpers.replicated import with_replicas
from helpers.server import PATIENT, served_folder, serving
from quire import LLM, AsyncLLM, SamplingParams
from quire.config import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import (
    EngineState,
    EngineStats,
    EngineUnavailableError,
    GenerateAsk,
    OverloadedError,
    Stream,
)
from quire.engine.front.merged_stats import merged_stats
from quire.engine.front.replicated_engine import ReplicatedEngine
from quire.engine.front.serving_engine import serving_engine
from quire.engine.usage_ledger import UsageTotals
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.shares import ServedModel, divided
from quire.spec import read_model
from quire.types import CheckpointError, MemoryBudgetError, Request, RequestError, TokenIds

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=3_900, ignore_eos=True)
PROMPTS = [[number, *range(3, 40 + number)] for number in range(1, 7)]
BOUND = 8 * 2**30
OPTIONS: dict[str, Any] = {"threads": 1, "max_model_len": 4000, "data_parallel_size": 2}
ONE_WAITS = ServingConfig(max_num_queued_reqs=1, **PATIENT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_folder(tmp_path_factory.mktemp("replicas") / "model")


def asked(name: str, ids: list[int], params: SamplingParams = GREEDY, **more: Any) -> GenerateAsk:
    return GenerateAsk(
        request=Request(
            request_id=name, prompt_token_ids=TokenIds(ids), params=params, arrival=time.monotonic(), **more
        )
    )


async def ended(stream: Stream) -> list[int]:
    async for _ in stream:
        pass
    return list(stream.output.outputs[0].token_ids)


async def until(true: Callable[[], bool]) -> None:
    """Wait for something that must come; the time is only a bound for a failing test."""
    async with asyncio.timeout(300):
        while not true():
            await asyncio.sleep(0.01)


def with_engine(
    folder: Path, check: Callable[[ReplicatedEngine], Coroutine[Any, Any, None]], *, in_process: bool = True,
    serving: ServingConfig | None = None, **options: Any,
) -> None:  # fmt: skip
    """Run a check with two replicas."""
    with_replicas(folder, EngineConfig(**OPTIONS | options), check, serving, in_process=in_process)


def test_answers_equal_those_of_one_engine(folder: Path) -> None:
    params = [GREEDY, SEEDED] * 3
    with LLM(folder, threads=1, max_model_len=4000, progress=False) as llm:
        expected = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params, use_tqdm=False)]

    async def run() -> None:
        async with AsyncLLM(folder, **OPTIONS) as llm:
            found = await llm.generate(PROMPTS, params)
            assert [list(one.outputs[0].token_ids) for one in found] == expected
            assert len(await llm.generate("a text", GREEDY)) == 1
            engine: Any = llm._engine
            tokens = sum(map(len, PROMPTS)) + len(llm.tokenizer.encode("a text"))  # type: ignore[union-attr]
            # reported a few times a second; and no replica got nothing
            await until(lambda: all(each.stats.prefill_tokens for each in engine._engines))
            await until(lambda: sum(used.prompt for used in engine.ledger.total.values()) == tokens)

    asyncio.run(run())


def test_a_prompt_goes_where_its_beginning_is_cached(folder: Path) -> None:
    shared = list(range(3, 100)) * 2  # 194 tokens, of which three pieces of 64 are remembered

    async def check(engine: ReplicatedEngine) -> None:
        homes = engine._replicas
        for tail in range(3, 9):
            stream = engine.generate(asked(f"p{tail}", [*shared, tail]))
            await ended(stream)
            assert bool(stream.output.usage.cached_tokens) == (tail > 3)
        first = engine._where["p3"]
        assert all(engine._where[f"p{tail}"] is first for tail in range(3, 9))
        # what another tenant sends is not cached for it, and goes where less was done
        assert not any(each.cached([]) for each in homes)
        streams = [engine.generate(asked(f"e{n}", [9, *range(60, 90)], ENDLESS)) for n in range(2)]
        assert {engine._where["e0"], engine._where["e1"]} == {each.engine for each in homes}
        with pytest.raises(RequestError, match="already in use"):
            engine.generate(asked("e0", [5]))
        for stream in streams:
            stream.cancel()
        await until(lambda: not any(each.requests for each in homes))
        assert [each.work for each in homes] == [0.0, 0.0]
        # with its home busy for long, a prompt is computed anew elsewhere
        homes[0 if first is homes[0].engine else 1].work = 1e6
        await ended(engine.generate(asked("busy", [*shared, 50])))
        assert engine._where["busy"] is not first
        assert await engine.clear_prefix_cache(60.0)
        stream = engine.generate(asked("cleared", [*shared, 51]))
        await ended(stream)
        assert stream.output.usage.cached_tokens == 0

    with_engine(folder, check)


def test_the_queue_is_full_when_those_of_all_are(folder: Path) -> None:
    async def check(engine: ReplicatedEngine) -> None:
        streams = [engine.generate(asked(f"{n}", [5, 6, n], ENDLESS)) for n in range(2)]
        await until(lambda: engine.stats.running == 2)
        streams += [engine.generate(asked(f"{n}", [5, 6, n], ENDLESS)) for n in range(2, 4)]
        assert engine.stats.replica_requests == (2, 2)
        await until(lambda: engine.stats.waiting == 2)
        with pytest.raises(OverloadedError, match="the queue is full: 1 requests are waiting"):
            engine.generate(asked("more", [5]))
        assert [request.request_id for request, _ in engine.requests()] == ["0", "1", "2", "3"]
        assert engine.cancel("3")
        assert not engine.cancel("3")
        streams.append(engine.generate(asked("in its place", [5])))
        for stream in streams:
            stream.cancel()

    with_engine(folder, check, serving=ONE_WAITS, max_num_seqs=1)


def test_a_replica_that_dies_leaves_the_others_alone(folder: Path) -> None:
    async def check(engine: ReplicatedEngine) -> None:
        streams = [engine.generate(asked(f"{n}", [5, n], ENDLESS)) for n in range(2)]
        await until(lambda: engine.stats.running == 2)
        lost = engine._where["0"]
        before = len(streams[1].output.outputs[0].token_ids)
        assert lost.pid is not None
        os.kill(lost.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError, match="not completed"):
            await ended(streams[0])
        assert engine.state is EngineState.READY
        for n in range(3):  # while it restarts, and later
            assert await ended(engine.generate(asked(f"after {n}", [5, 6, n])))
        found: AsyncIterator[Any] = streams[1].__aiter__()
        await anext(found)
        assert len(streams[1].output.outputs[0].token_ids) >= before
        await until(lambda: min(engine.stats.replica_requests) >= 0)
        assert engine.stats.restarts == 1
        streams[1].cancel()

    with_engine(folder, check, in_process=False, serving=ONE_WAITS, max_model_len=40000)


def test_settings_and_sleep_reach_all(folder: Path) -> None:
    async def check(engine: ReplicatedEngine) -> None:
        await engine.configure(replace(engine.live, max_num_seqs=3))
        assert [each.live.max_num_seqs for each in engine._engines] == [3, 3]
        with pytest.raises(ValueError, match="max_num_seqs"):
            await engine.configure(replace(engine.live, max_num_seqs=10**6))
        assert [each.live.max_num_seqs for each in engine._engines] == [3, 3]
        engine.share_cache({"a": 0.5})
        assert [each.live.cache_shares for each in engine._engines] == [{"a": 0.5}] * 2
        assert await engine.ping(60.0)
        held = await engine.memory()
        assert sum(held["planned"].values()) <= held["bound"] == BOUND
        await engine.sleep(1, 0.0)
        assert engine.state is EngineState.SLEEPING
        with pytest.raises(EngineUnavailableError):
            engine.generate(asked("x", [5]))
        await engine.wake()
        assert await ended(engine.generate(asked("y", [5])))
        assert len((await engine.debug())["steps"]) >= 16

    with_engine(folder, check, memory=BOUND)


def test_adapters_are_those_of_all(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", random_adapter(read_model(folder).spec, 1, 4, scale=4.0))
    with LLM(
        folder,
        threads=1,
        enable_lora=True,
        adapters={"one": str(adapter)},
        max_model_len=4000,
        progress=False,
    ) as llm:
        expected = list(llm.generate([5, 6], GREEDY, adapter="one", use_tqdm=False)[0].outputs[0].token_ids)

    async def check(engine: ReplicatedEngine) -> None:
        version = await engine.load_adapter("one", str(adapter))
        assert engine.adapters == {"one": version}
        streams = [engine.generate(asked(f"{n}", [5, 6], adapter=version.digest)) for n in range(4)]
        assert len({engine._where[f"{n}"] for n in range(4)}) == 2
        assert [await ended(stream) for stream in streams] == [expected] * 4
        mixed, end = await engine.mix_adapters([("one", 0.5)])
        streams = [engine.generate(asked(f"m{n}", [5, 6], adapter=mixed.digest)) for n in range(2)]
        first, second = [await ended(stream) for stream in streams]
        assert first == second
        end()
        with pytest.raises(CheckpointError):
            await engine.load_adapter("one", str(tmp_path / "nothing"))
        assert engine.adapters == {"one": version}
        engine.unload_adapter("one")
        assert not any(each.adapters for each in engine._engines)

    with_engine(folder, check, enable_lora=True)


def test_reports_are_added_up() -> None:
    first = EngineStats(
        running=1, blocks=5, step_seconds=0.5, step_tokens=(1, 2), flops={"bf16": 1.0}, compute_share=0.2,
        step_cost_error=0.1, degrade_steps={"shed": 1}, words=(3, 4), step_costs=(1.0,),
        usage=(UsageTotals("a", "", 1, 2, 3, 4.0, 5.0),), adapter_bytes=(1, 2), replica_wait_seconds=(1.5,),
    )  # fmt: skip
    second = EngineStats(
        running=2, blocks=5, step_seconds=0.25, step_tokens=(1, 2, 3), flops={"int8": 2.0}, bandwidth_share=0.5,
        step_cost_error=0.3, degrade_steps={"shed": 1, "cap": 0}, words=(3, 4),
        usage=(UsageTotals("a", "", 1), UsageTotals("b", "t", 2)), adapter_bytes=(3, 4),
    )  # fmt: skip
    assert merged_stats([first, second]) == EngineStats(
        running=3, blocks=10, step_seconds=0.75, step_tokens=(2, 4, 3), flops={"bf16": 1.0, "int8": 2.0},
        compute_share=0.2, bandwidth_share=0.5, step_cost_error=0.3, degrade_steps={"shed": 1, "cap": 0}, words=(3, 4),
        step_costs=(1.0,), usage=(UsageTotals("a", "", 2, 2, 3, 4.0, 5.0), UsageTotals("b", "t", 2)),
        adapter_bytes=(4, 6), replica_wait_seconds=(1.5, 0.0),
    )  # fmt: skip


def test_what_replicas_cannot_be(folder: Path) -> None:
    with pytest.raises(ValueError, match="data_parallel_size: replicas are of a server"):
        LLM(folder, **OPTIONS)
    with pytest.raises(ValueError, match="by data_parallel_size 40 is more than 64 ranks"):
        EngineConfig(tensor_parallel_size=2, data_parallel_size=40)
    with pytest.raises(MemoryBudgetError, match="nothing is left for the 2 replicas"):
        serving_engine(folder, EngineConfig(memory=2**20, data_parallel_size=2))
    config = EngineConfig(data_parallel_size=2, memory=2**30)
    models = [ServedModel(name, str(folder), config, ServingConfig()) for name in "ab"]
    with pytest.raises(ValueError, match="data_parallel_size: a server of several models"):
        Fleet(models, divided(2**32, models, ServingConfig()), ServingConfig())


def test_a_server_with_replicas(folder: Path) -> None:
    options = {"max_model_len": 65_000, "data_parallel_size": 2}
    with serving(folder, options, **PATIENT) as server:
        texts = {
            server.complete("Once upon a time", max_tokens=8, temperature=0).json["choices"][0]["text"]
            for _ in range(4)
        }
        assert len(texts) == 1
        assert [server.metric("quire_replica_ready", replica=str(n)) for n in range(2)] == [1, 1]
        with server.busy(2):
            assert [server.metric("quire_replica_requests", replica=str(n)) for n in range(2)] == [1, 1]
            listed = server.get("/v1/requests").json["data"]
            assert len(listed) == 2
        server.wait(server.idle)
        for each in listed:  # by the log of the replica that had it
            assert server.get(f"/v1/requests/{each['id']}/explain").json["finished"]
        assert server.get("/v1/overview").json["overview"]["state"] == "ready"
        assert server.get("/v1/models").json["data"][0]["max_model_len"] == 65_000
