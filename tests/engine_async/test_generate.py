"""What callers get: the same as from SyncEngine, whatever the load, and nothing after they have left."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_async.running import ON_AND_ON, ask, collect, run, running, until
from helpers.memory import memory_for
from quire.answers import AnswerPart
from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import (
    Ask,
    DeadlineError,
    EngineState,
    EngineUnavailableError,
    OverloadedError,
    StreamDelta,
)
from quire.engine.build.assemble import build
from quire.engine.build.opening import open_model
from quire.engine.front.async_engine import AsyncEngine
from quire.engine.host.messages import StepReport
from quire.engine.sync_engine import SyncEngine
from quire.logprobs import LogprobTable, TokenLogprob
from quire.text.chat_renderer import ChatAsk
from quire.types import (
    CheckpointError,
    FinishReason,
    MemoryBudgetError,
    QuireError,
    RequestError,
    SamplingParams,
)

SMALL: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "num_kv_blocks": 40}


def mixed() -> list[tuple[list[int], SamplingParams]]:
    """Every way a request can end and every thing it can report, with prompts that share beginnings."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.2, "seed": 5, "n": 3},
        {"temperature": 0.8, "seed": 6, "logprobs": 2, "top_p": 0.9},
        {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
        {"temperature": 1.0, "seed": 7, "stop": ["e", "KN"], "n": 2},
        {"temperature": 1.0, "seed": 8, "stop": ["a"], "include_stop_str_in_output": True, "min_tokens": 4},
        {"temperature": 1.5, "seed": 9, "stop_token_ids": list(range(60, 80)), "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 10, "logit_bias": {2: 3.0}, "ignore_eos": False},
    ]
    asks = []
    for i in range(24):
        kind = {"ignore_eos": True, "max_tokens": 10 + i} | kinds[i % len(kinds)]
        asks.append(([50 + j % 7 for j in range(5 + 3 * (i % 9))] + [3 + i], SamplingParams(**kind)))
    return asks


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[Any]:
    """Each request alone in a SyncEngine."""
    config = EngineConfig(memory=memory_for(2**30), num_kv_blocks=512, threads=1)
    engine = SyncEngine(build(open_model(tiny), config))
    outputs = []
    for prompt, params in mixed():
        outputs.append(engine.add(Ask(prompt=prompt, params=params)))
        while engine.has_work():
            engine.step()
    return outputs


@pytest.mark.parametrize("in_process", [True, False])
def test_the_same_as_alone_whatever_the_load(tiny: Path, expected: list[Any], in_process: bool) -> None:
    async def work() -> None:
        async with running(tiny, in_process=in_process, **SMALL) as engine:
            eos = engine.card.eos_token_ids
            streams = [
                engine.generate(ask(f"r{i}", *one, eos_token_ids=eos)) for i, one in enumerate(mixed())
            ]
            collected = await asyncio.gather(*map(collect, streams))
            for want, stream, (texts, tokens) in zip(expected, streams, collected, strict=True):
                got = stream.output
                assert got.outputs == want.outputs
                assert got.prompt_logprobs == want.prompt_logprobs
                assert texts == [sample.text for sample in got.outputs]
                assert tokens == [sample.token_ids for sample in got.outputs]
                assert got.usage.completion_tokens == want.usage.completion_tokens
                times = got.timings
                assert 0 < times.arrival <= times.scheduled <= times.first_token <= times.finished
            await until(lambda: (stats := engine.stats).steps > 0 and stats.running == stats.blocks_used == 0)

    run(work())


def test_cached_tokens_are_reported(tiny: Path) -> None:
    async def work() -> None:
        async with running(tiny) as engine:
            prompt = list(range(3, 60))
            for cached in (0, 48):
                stream = engine.generate(ask("r", prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
                await collect(stream)
                assert stream.output.usage.cached_tokens == cached

    run(work())


@pytest.mark.parametrize("how", ["cancel", "drop", "task"])
def test_a_caller_that_leaves_costs_nothing_more(endless: Path, how: str) -> None:
    async def leave(engine: Any) -> None:
        stream = engine.generate(ask("left"))
        async for _ in stream:
            if how == "cancel":
                stream.cancel()
                break
            if how == "task":
                await asyncio.sleep(3600)
            break

    async def work() -> None:
        async with running(endless) as engine:
            stays = engine.generate(ask("stays"))
            task = asyncio.create_task(leave(engine))
            if how == "task":
                await anext(aiter(stays))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                del task  # its traceback holds the stream
            else:
                await task
            gc.collect()
            await until(lambda: engine.stats.running == 1)
            await anext(aiter(stays))
            stays.cancel()
            await until(lambda: engine.stats.blocks_used == engine.stats.running == 0)
            assert engine.stats.wasted_tokens >= 0
            await collect(stays)
            assert stays.output.outputs[0].finish_reason is FinishReason.ABORT
            engine.generate(ask("left")).cancel()  # its name is free again

    run(work())


def test_a_stop_string_ends_the_computing(endless: Path) -> None:
    async def work() -> None:
        async with running(endless) as engine:
            sample = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
            text = (await collect(engine.generate(ask("r", params=sample))))[0][0]
            stop = text[len(text) // 2]
            stream = engine.generate(ask("r", params=replace(sample, max_tokens=60_000, stop=[stop])))
            assert (await collect(stream))[0] == [text[: text.index(stop)]]
            assert stream.output.outputs[0].stop_reason == stop
            await until(lambda: engine.stats.running == engine.stats.blocks_used == 0)

    run(work())


def test_tokens_that_were_not_delivered_are_counted(endless: Path) -> None:
    async def work() -> None:
        async with running(endless) as engine:
            stream = engine.generate(ask("r"))
            await until(lambda: stream.output.usage.completion_tokens >= 10)
            seen = len((await anext(aiter(stream))).token_ids)
            await until(lambda: stream.output.usage.completion_tokens >= seen + 10)
            stream.cancel()
            total = stream.output.usage.completion_tokens
            await until(lambda: engine.stats.running == 0)
            assert engine.stats.wasted_tokens >= total - seen

    run(work())


def test_a_slow_reader_delays_no_other_and_gets_everything(endless: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def work() -> None:
        async with running(endless) as engine:
            slow, fast = (
                engine.generate(ask("slow", params=params)),
                engine.generate(ask("fast", params=params)),
            )
            first = await anext(aiter(slow))
            texts, tokens = await collect(fast)
            assert len(tokens[0]) == 200
            await until(lambda: slow.output.finished)
            rest = [delta async for delta in slow]
            assert len(rest) <= 2  # merged while unread
            assert first.text + "".join(delta.text for delta in rest) == texts[0]
            assert [*first.token_ids, *(t for delta in rest for t in delta.token_ids)] == tokens[0]
            assert [first, *rest][-1].finish_reason is FinishReason.LENGTH

    run(work())


class TextAlone:
    """A sink of an answer that is text."""

    whole = False

    def take_parts(self, parts: Sequence[AnswerPart], now: float) -> bool:
        raise AssertionError

    def take_delta(self, delta: StreamDelta, now: float) -> bool:
        raise AssertionError

    def take_token(self, text: str, token_id: int, logprob: float | None, now: float) -> bool:
        raise AssertionError


def test_a_sink_accepts_or_leaves_text_in_order(endless: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Text goes to the sink or to the reader, once; a sink that raises gets no more text and harms no other."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    taken: list[str] = []

    async def attempt(engine: AsyncEngine, expected: tuple[list[str], list[list[int]]]) -> None:
        stream, other = engine.generate(ask("r", params=params)), engine.generate(ask("o", params=params))
        seen: list[str] = []
        calls = itertools.count(1)

        class Some(TextAlone):
            def take(self, text: str, now: float) -> bool:
                assert stream.output.outputs[0].token_ids  # a sample's first tokens are for the reader
                assert now <= time.monotonic()
                call = next(calls)
                if call > 40:
                    raise ZeroDivisionError
                if call % 3 == 0:
                    return False
                seen.append(text)
                taken.append(text)
                return True

        stream.deliver_to([Some()])
        async for delta in stream:
            seen.append(delta.text)
            # settled whenever something is read
            assert stream.output.usage.completion_tokens == len(stream.output.outputs[0].token_ids)
        assert "".join(seen) == expected[0][0]
        assert stream.output.outputs[0].token_ids == expected[1][0]
        assert await collect(other) == expected

    async def work() -> None:
        async with running(endless) as engine:
            expected = await collect(engine.generate(ask("r", params=params)))
            while not taken:  # steps that come while the reader is late are all for the reader
                await attempt(engine, expected)

    run(work())
    assert caplog.text.count("writing a delta of r failed") <= 1


def test_usage_includes_text_that_sinks_accepted(endless: Path) -> None:
    """Several samples, one of which refuses now and then, and a reader that stops waiting and begins again."""
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=60, ignore_eos=True)

    class Some(TextAlone):
        def __init__(self, texts: list[str], every: int) -> None:
            self.texts, self.every, self.calls = texts, every, 0

        def take(self, text: str, now: float) -> bool:
            self.calls += 1
            if self.calls % self.every == 0:
                return False
            self.texts.append(text)
            return True

    async def work() -> None:
        async with running(endless) as engine:
            expected = await collect(engine.generate(ask("r", params=params)))
            stream = engine.generate(ask("r", params=params))
            texts: list[list[str]] = [[], [], []]
            stream.deliver_to([Some(text, every) for text, every in zip(texts, (7, 1000, 3), strict=True)])
            while True:
                try:
                    async with asyncio.timeout(0.003):
                        delta = await anext(stream)
                except TimeoutError:
                    continue
                except StopAsyncIteration:
                    break
                texts[delta.index].append(delta.text)
            assert ["".join(text) for text in texts] == expected[0]
            assert [sample.token_ids for sample in stream.output.outputs] == expected[1]
            assert stream.output.usage.completion_tokens == 180

    run(work())


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_a_whole_sink_takes_ids_and_logprobs(endless: Path, logprobs: int | None) -> None:
    """Deltas go to the sink or to the reader, in order, and are those of a reader alone."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=logprobs)
    taken: list[StreamDelta] = []

    async def attempt(engine: AsyncEngine, expected: list[StreamDelta]) -> None:
        stream = engine.generate(ask("r", params=params))
        seen: list[StreamDelta] = []
        calls = itertools.count(1)

        class Whole(TextAlone):
            whole = True

            def take(self, text: str, now: float) -> bool:
                raise AssertionError

            def take_delta(self, delta: StreamDelta, now: float) -> bool:
                if next(calls) % 4 == 0:
                    return False
                seen.append(delta)
                taken.append(delta)
                return True

            def take_token(self, text: str, token_id: int, logprob: float | None, now: float) -> bool:
                assert logprobs != 2
                if next(calls) % 3 == 0:
                    return False
                table = None
                if logprob is not None:  # these have no rank, and greedy tokens the first
                    table = LogprobTable.of([[TokenLogprob(token_id, logprob, 1)]])
                return self.take_delta(StreamDelta(0, text, [token_id], table), now)

        stream.deliver_to([Whole()])
        async for delta in stream:
            seen.append(delta)
            assert stream.output.usage.completion_tokens == len(stream.output.outputs[0].token_ids)
        for part in ("text", "token_ids"):
            assert joined(seen, part) == joined(expected, part)
        if logprobs is not None:
            assert joined(seen, "logprobs") == joined(expected, "logprobs")

    async def work() -> None:
        async with running(endless) as engine:
            expected = [delta async for delta in engine.generate(ask("r", params=params))]
            while not taken:
                await attempt(engine, expected)

    run(work())
    assert all((delta.logprobs is None) == (logprobs is None) for delta in taken)


def joined(deltas: list[StreamDelta], part: str) -> list[Any]:
    """A field of deltas, one after the other."""
    return [one for delta in deltas for one in getattr(delta, part)]


@pytest.mark.parametrize("serving", [ServingConfig(reader_tokens=50), ServingConfig(reader_timeout=0.2)])
def test_a_reader_that_never_reads_is_ended(endless: Path, serving: ServingConfig) -> None:
    async def work() -> None:
        async with running(endless, serving=serving) as engine:
            idle, busy = engine.generate(ask("idle")), engine.generate(ask("busy"))
            deltas = aiter(busy)
            while not idle.output.finished:
                await anext(deltas)
            with pytest.raises(QuireError, match="unread"):
                await collect(idle)
            assert not busy.output.finished
            while engine.stats.running != 1:
                await anext(deltas)

    run(work())


def test_a_standstill_of_the_process_ends_no_reader_that_reads(endless: Path) -> None:
    """Each step is followed by a look at the readers, an hour later by the clock, before they can run."""

    async def work() -> None:
        async with running(endless) as engine:
            stepped = engine.stepped

            def step_and_look(step: StepReport) -> None:
                stepped(step)
                engine.tick(time.monotonic() + 3600)

            engine.stepped = step_and_look  # type: ignore[method-assign]
            stream = engine.generate(ask("r"))
            for _ in range(20):
                await anext(stream)
            await until(lambda: stream.output.finished)  # no reader from here on
            with pytest.raises(QuireError, match="unread"):
                await collect(stream)

    run(work())


def test_deadlines(endless: Path) -> None:
    async def work() -> None:
        async with running(endless, max_num_seqs=1) as engine:
            now = time.monotonic()
            for late in ({"deadline": now - 1}, {"queue_deadline": now - 1}):
                with pytest.raises(DeadlineError, match="passed before it started"):
                    engine.generate(ask("late", **late))
            for seconds in (0.1, 1.0, 10.0):  # until it is enough for a first token
                runs = engine.generate(ask("runs", deadline=time.monotonic() + seconds))
                with pytest.raises(DeadlineError, match="not finished within"):
                    await collect(runs)
                if runs.output.outputs[0].token_ids:  # partial output stays
                    break
            assert runs.output.outputs[0].token_ids
            await anext(runs := engine.generate(ask("runs", queue_deadline=time.monotonic() + 3600)))
            waits = engine.generate(ask("waits", queue_deadline=time.monotonic() + 0.05))
            with pytest.raises(DeadlineError, match="not started within"):
                await collect(waits)
            assert not waits.output.timings.scheduled
            runs.cancel()
            short = SamplingParams(max_tokens=2, ignore_eos=True)
            done = engine.generate(ask("done", params=short, deadline=time.monotonic() + 3600))
            (timer,) = done._live.timers  # type: ignore[attr-defined]
            await collect(done)
            assert timer.cancelled()  # nothing is kept until then
            await until(lambda: engine.stats.running == engine.stats.waiting == 0)

    run(work())


def test_a_full_queue_refuses_with_the_numbers(endless: Path) -> None:
    async def work() -> None:
        async with running(
            endless, serving=ServingConfig(max_num_queued_reqs=2, max_num_queued_tokens=100), max_num_seqs=1
        ) as engine:
            streams = [engine.generate(ask(f"r{i}")) for i in range(3)]
            with pytest.raises(OverloadedError, match=r"2 requests are waiting \(limit 2\)"):
                engine.generate(ask("r3"))
            streams.pop().cancel()
            with pytest.raises(
                OverloadedError, match=r"prompt tokens are waiting, and 99 more .* limit of 100"
            ):
                engine.generate(ask("r3", [5] * 99))
            streams.append(engine.generate(ask("r3")))
            assert engine.stats.waiting_tokens > 0
            with pytest.raises(RequestError, match="already in use"):
                engine.generate(ask("r0"))

    run(work())


def test_the_impossible_never_reaches_the_engine(tiny: Path) -> None:
    async def work() -> None:
        async with running(tiny, max_model_len=64) as engine:
            for prompt, params, field in [
                ([5] * 64, SamplingParams(), "prompt_token_ids"),
                ([128], SamplingParams(), "prompt_token_ids"),
                ([5], SamplingParams(stop_token_ids=[128]), "stop_token_ids"),
            ]:
                with pytest.raises(RequestError) as refused:
                    engine.generate(ask("r", prompt, params))
                assert refused.value.field == field
            assert engine.stats.steps == 0

    run(work())


def test_text_is_handled_off_the_loop_and_bounded(tiny: Path) -> None:
    async def work() -> None:
        async with running(tiny, max_model_len=64) as engine:
            ids = await engine.encode("Hi there")
            assert await engine.decode(ids) == "Hi there"
            assert "".join(engine.pieces(ids)) == "Hi there"
            assert b"".join(map(engine.token_bytes, ids)) == b"Hi there"
            chat = ChatAsk(messages=[{"role": "user", "content": "Hi"}])
            rendered = await engine.render_chat(chat)
            assert await engine.encode_chat(chat) == await engine.encode(rendered, add_special_tokens=False)
            long = ChatAsk(messages=[{"role": "user", "content": "x" * 100}])
            for awaitable, field, number in (
                (engine.encode("x" * 64), "prompt", "64 tokens"),
                (engine.encode("x" * 10**6), "prompt", "1000000 characters"),
                (engine.encode("\ud800"), "prompt", "surrogate"),
                (
                    engine.encode_chat(long),
                    "messages",
                    "no room for an output token in the model's context of 64",
                ),
                (engine.decode([5] * 65), "tokens", "65"),
            ):
                with pytest.raises(RequestError, match=number) as refused:
                    await awaitable
                assert refused.value.field == field
            assert len(await engine.encode("x" * 63)) == 63

    run(work())


@pytest.mark.parametrize("in_process", [True, False])
def test_errors_of_loading_reach_the_caller(
    tiny: Path, endless: Path, in_process: bool, tmp_path: Path
) -> None:
    async def work() -> None:
        with pytest.raises(MemoryBudgetError, match="cannot hold"):
            async with running(tiny, in_process=in_process, memory=2**20, num_kv_blocks=None):
                pass
        with pytest.raises(CheckpointError):
            async with running(endless, in_process=in_process, load_format="auto"):
                pass
        with pytest.raises(CheckpointError):
            async with running(tmp_path / "nothing", in_process=in_process):
                pass
        serving = ServingConfig(chat_template=str(tmp_path / "none.jinja"))
        with pytest.raises(CheckpointError, match=r"none\.jinja"):
            async with running(tiny, in_process=in_process, serving=serving):
                pass

    run(work())


@pytest.mark.parametrize("in_process", [True, False])
def test_draining_lets_running_requests_finish(tiny: Path, in_process: bool) -> None:
    async def work() -> None:
        async with running(tiny, in_process=in_process) as engine:
            stream = engine.generate(
                ask("r", params=SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
            )
            await anext(aiter(stream))
            stopping = asyncio.create_task(engine.stop(30))
            await asyncio.sleep(0)
            assert engine.state is EngineState.DRAINING
            with pytest.raises(EngineUnavailableError, match="shutting down"):
                engine.generate(ask("new"))
            await collect(stream)
            assert len(stream.output.outputs[0].token_ids) == 150
            await stopping
            assert engine.pid is None

    run(work())


def test_requests_that_drain_too_long_are_ended(endless: Path) -> None:
    async def work() -> None:
        async with running(endless) as engine:
            stream = engine.generate(ask("r", params=ON_AND_ON))
            await anext(aiter(stream))
            await engine.stop(0.1)
            with pytest.raises(EngineUnavailableError, match="shutting down"):
                await collect(stream)

    run(work())


def test_a_reader_who_asks_for_it_is_told_how_far_the_prompt_is(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deltas without text after each step of the prompt, then one with the first tokens; nobody else gets any."""
    reports: list[tuple[int, int, int]] = []
    stepped = AsyncEngine.stepped

    def seen(engine: AsyncEngine, step: StepReport) -> None:
        reports.extend(step.unpack_prompts())
        stepped(engine, step)

    monkeypatch.setattr(AsyncEngine, "stepped", seen)

    async def work() -> None:
        async with running(tiny, **SMALL) as engine:
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, n=2)
            prompt = [i % 90 + 3 for i in range(100)]
            silent = [delta.progress async for delta in engine.generate(ask("silent", prompt, params))]
            assert silent
            assert not any(silent)
            reports.clear()
            told = [d async for d in engine.generate(ask("told", prompt[::-1], params, progress=True))]
            assert [computed for _, computed, _ in reports] == [24, 48, 72, 96]
            assert not any(cached for _, _, cached in reports)
            steps = [(d.index, d.progress, d.token_ids) for d in told if d.progress is not None]
            processed = [progress.processed for _, progress, _ in steps]  # unread ones are merged
            assert processed == sorted(set(processed) & {24, 48, 72, 96, 100})
            assert processed[-1] == 100
            assert all(progress[:2] == (100, 0) and not index for index, progress, _ in steps)
            assert [bool(ids) for _, _, ids in steps] == [False] * (len(steps) - 1) + [True]
            seconds = [progress.seconds for _, progress, _ in steps]
            assert seconds[0] > 0
            assert seconds == sorted(seconds)
            again = [
                d.progress async for d in engine.generate(ask("again", prompt[::-1], params, progress=True))
            ]
            first = next(progress for progress in again if progress is not None)
            assert first.cached >= 64
            assert first.processed > first.cached

    run(work())
