"""Generation programs on an AsyncLLM: the text of the same program on an LLM, and an end when they are cancelled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quire import LLM, AsyncLLM, ProgramState, function, gen, select
from quire.types import ContextLengthError, QuireError

STORY = "Once upon a time a fox lived in a wood. " * 8
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


@function(seed=5, max_tokens=10)
async def tales(s: ProgramState, topic: str) -> list[str]:
    s += f"{STORY} About {topic}: " + gen("first")
    await s
    forks = s.fork(3)
    for fork in forks:
        fork += s["first"] + gen("then") + select("mood", [" Good", " Bad"])
    await forks
    return [s["first"], *forks["then"], *forks["mood"]]


@function(seed=5, max_tokens=10)
def tales_sync(s: ProgramState, topic: str) -> list[str]:
    s += f"{STORY} About {topic}: " + gen("first")
    forks = s.fork(3)
    for fork in forks:
        fork += s["first"] + gen("then") + select("mood", [" Good", " Bad"])
    return [s["first"], *forks["then"], *forks["mood"]]


def test_programs_on_an_async_llm(llm: LLM) -> None:
    expected = {topic: tales_sync.run(llm, topic).returned for topic in ("tea", "ships")}

    async def run() -> None:
        async with AsyncLLM(max_num_seqs=16) as served:
            await same_texts(served, expected)
            await hits(served)
            await streams(served)
            await errors(served)
            await cancelling(served)

    asyncio.run(run())


async def same_texts(llm: AsyncLLM, expected: dict[str, list[str]]) -> None:
    assert (await tales.run(llm, "tea")).returned == expected["tea"]
    some = await asyncio.gather(*(tales.with_options(at_once=2).run(llm, topic) for topic in expected))
    assert [state.returned for state in some] == [*expected.values()]
    plain = await function(lambda s: s.__iadd__("Once" + gen("a", max_tokens=4))).run(llm)
    assert plain["a"] == plain.returned["a"]


async def hits(llm: AsyncLLM) -> None:
    s = ProgramState(llm, max_tokens=4)
    s += "Quite another text. " + STORY
    forks = s.fork(8)
    for i, fork in enumerate(forks):
        fork += f"Chapter {i}" + gen("a")
    with pytest.raises(QuireError, match="await the state"):
        s.run()
    await forks
    prefix = len(llm.tokenizer.encode("Quite another text. " + STORY))  # type: ignore[union-attr]
    assert all(fork.usage.cached_tokens >= (prefix - 1) // 16 * 16 for fork in forks)


async def streams(llm: AsyncLLM) -> None:
    s = ProgramState(llm, temperature=0)
    # Long: what is made before the reader's turn comes in one piece.
    s += (
        "Once upon a time"
        + gen("a", regex="[a-z ]{5,9}")
        + " And"
        + gen("b", max_tokens=400, ignore_eos=True)
    )
    pieces = [piece async for piece in s.stream("b")]
    assert len(pieces) > 1
    await s
    assert "".join(pieces) == s["b"]
    assert re.fullmatch("[a-z ]{5,9}", s["a"])
    with pytest.raises(QuireError, match="use `async for`"):
        next(iter(s.stream("b")))


async def errors(llm: AsyncLLM) -> None:
    forks = ProgramState(llm).fork(3)
    for i, fork in enumerate(forks):
        fork += "Once" + gen("a", max_tokens=9000 if i == 1 else 4)
    with pytest.raises(ContextLengthError):
        await forks
    assert forks[0]["a"]
    assert forks[2]["a"]
    with pytest.raises(ContextLengthError):
        await function(lambda s: s.__iadd__("Once" + gen("a", max_tokens=9000))).run(llm)


async def cancelling(llm: AsyncLLM) -> None:
    async def four(s: ProgramState) -> None:
        forks = s.fork(4)
        for fork in forks:
            fork += "Once upon a time" + gen("a", **LONG)
        await forks

    running = asyncio.create_task(function(four).run(llm))
    await until(lambda: llm._engine.stats.running == 4)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: llm._engine.stats.running == 0)

    s = ProgramState(llm, at_once=3)
    forks = s.fork(6)
    for fork in forks:
        fork += "Once upon a time" + gen("a", **LONG)
    waiting: Coroutine[Any, Any, Any] = forks.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await waiting
    assert all(isinstance(fork.error, QuireError) for fork in forks)
    await until(lambda: llm._engine.stats.running == 0)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.02)
