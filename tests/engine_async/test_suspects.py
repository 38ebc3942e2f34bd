"""A request that kills the engine is found and refused; those that were there by chance are not."""

from __future__ import annotations

import asyncio
import os
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine_async.running import ON_AND_ON, ask, collect, run, running, until
from quire.answers import AnswerRegions
from quire.config.serving import ServingConfig
from quire.engine.api import EngineState, EngineUnavailableError, RequestBlockedError
from quire.engine.front.async_engine import AsyncEngine
from quire.engine.front.suspects import KEEP_SECONDS, Suspects, digest_of
from quire.engine.host.hosts import ProcessHost
from quire.engine.request_forms import constrained
from quire.types import Grammar, SamplingParams

SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
A, B, P = b"a", b"b", b"p"


def test_the_one_that_is_always_there_is_to_blame() -> None:
    suspects = Suspects()
    assert not suspects
    assert suspects.died([A, P], 0.0) is None
    assert suspects
    assert not suspects.careful(P)
    assert suspects.died([B, P], 1.0) == P
    assert suspects.deaths(P, 2.0) == 2
    assert suspects.deaths(A, 2.0) == suspects.deaths(B, 2.0) == 0


def test_several_suspects_are_distinguished_one_by_one() -> None:
    suspects = Suspects()
    for now in (0.0, 1.0):
        assert suspects.died([A, B, P], now) is None
    assert all(map(suspects.careful, (A, B, P)))
    suspects.clear(A)  # it ran alone and completed
    assert not suspects.careful(A)
    assert suspects.died([P, A], 2.0) == P
    assert suspects.careful(B)
    assert suspects.deaths(A, 2.0) == 0


def test_old_deaths_are_forgotten() -> None:
    suspects = Suspects()
    suspects.died([P], 0.0)
    assert suspects.died([P], KEEP_SECONDS + 1) is None
    assert suspects.died([P], KEEP_SECONDS + 2) == P
    assert suspects.deaths(P, 2 * KEEP_SECONDS + 3) == 0
    assert not suspects
    assert suspects.died([], 0.0) is None


def test_a_request_is_identified_by_its_content() -> None:
    same = {
        digest_of(ask("one").request),
        digest_of(ask("two", (40, 41, 42), priority=3).request),
        digest_of(ask("x", array("i", (40, 41, 42))).request),
    }
    assert len(same) == 1
    assert digest_of(ask("one", (40, 41)).request) not in same
    assert digest_of(ask("one", params=SHORT).request) not in same
    assert digest_of(ask("one", namespace="other").request) not in same


def test_the_form_of_its_answer_is_part_of_a_request() -> None:
    plain = constrained(ask("one").request, Grammar("start: /a/", b"1"))
    budgets = [replace(plain, regions=AnswerRegions(thinking=True, budget=budget)) for budget in (3, 4)]
    other = constrained(ask("one").request, Grammar("start: /b/", b"2"))
    digests = {digest_of(one) for one in (ask("one").request, plain, other, *budgets)}
    assert len(digests) == 5
    again = replace(plain, request_id="two", regions=AnswerRegions(thinking=True, budget=3))
    assert digest_of(again) == digest_of(budgets[0])


class PoisonedHost(ProcessHost):
    """An engine that a prompt can kill: tests/engine_async/poisoned.py."""

    module = "engine_async.poisoned"


def poison(variant: int = 0) -> Sequence[int]:
    return (66, 66, 66, 5 + variant)


async def dies(engine: AsyncEngine, *names: str, variant: int = 0) -> None:
    """The poison runs together with others, which all get a retryable error; then the engine is back."""
    others = [engine.generate(ask(name, (50 + i, 51), ON_AND_ON)) for i, name in enumerate(names)]
    if others:
        await anext(aiter(others[-1]))
    for stream in [*others, engine.generate(ask("poison", poison(variant), SHORT))]:
        with pytest.raises(EngineUnavailableError):
            await collect(stream)
    await until(lambda: engine.state is EngineState.READY)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


@pytest.mark.usefixtures("poisoned")
def test_a_request_that_kills_is_refused_and_the_engine_lives(
    endless: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two deaths are one more than the engine may have for failures of its own."""

    async def work() -> None:
        serving = ServingConfig(engine_restarts=1)
        async with running(endless, in_process=False, serving=serving, host=PoisonedHost) as engine:
            await dies(engine, "neighbour")
            last = engine.generate(ask("poison", poison(), SHORT))
            with pytest.raises(RequestBlockedError, match="died 2 times"):
                await collect(last)
            await until(lambda: engine.state is EngineState.READY)
            pid = engine.pid
            with pytest.raises(RequestBlockedError, match="refused for 10 minutes"):
                engine.generate(ask("again", poison(), SHORT))
            await collect(engine.generate(ask("neighbour", (50, 51), SHORT)))
            assert engine.pid == pid
            await dies(engine, variant=1)  # another poison: the first one's deaths do not count any more
            with pytest.raises(RequestBlockedError):
                await collect(engine.generate(ask("poison", poison(1), SHORT)))
            await until(lambda: engine.state is EngineState.READY)
        assert "the engine died 2 times while computing request poison" in caplog.text

    run(work())


@pytest.mark.usefixtures("poisoned")
def test_suspects_run_one_at_a_time(endless: Path) -> None:
    async def work() -> None:
        async with running(endless, in_process=False, host=PoisonedHost) as engine:
            for _ in range(2):
                await dies(engine, "a", "b")
            a = engine.generate(ask("a", (50, 51), ON_AND_ON))
            b = engine.generate(ask("b", (51, 51), ON_AND_ON))
            killer = engine.generate(ask("poison", poison(), SHORT))
            free = engine.generate(ask("free", (9, 9), SHORT))
            await collect(free)  # not a suspect: runs at the same time
            await anext(aiter(a))
            assert not b.output.timings.scheduled
            assert not killer.output.timings.scheduled
            b.cancel()  # one that waits may leave
            a.cancel()  # so the poison is next
            with pytest.raises(RequestBlockedError, match="died 3 times"):
                await collect(killer)
            await until(lambda: engine.state is EngineState.READY)
            await asyncio.gather(
                *(collect(engine.generate(ask(n, (50 + i, 51), SHORT))) for i, n in enumerate("ab"))
            )
            assert engine.stats.waiting_tokens == 0

    run(work())
