"""Callers that leave, in every phase: blocks are free before the next step, and no sample gets more than the token of
the step that was being run."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.server import GUARD, LiveServer, request_bytes, serving
from quire.engine.api import GenerateAsk
from quire.engine.front.async_engine import AsyncEngine
from quire.engine.front.stream import LiveRequest
from quire.engine.host.loop import EngineLoop
from quire.engine.host.messages import SAMPLE_BITS, Abort, StepReport, unpack_handles, unpack_ids
from quire.types import Request, SamplingParams, TokenIds

LEAVERS = pytest.mark.parametrize("leavers", [30, pytest.param(1000, marks=pytest.mark.chaos)])
PHASES = ("waiting", "prefilling", "decoding", "streaming", "finished")
# Few places, and prompts that take several steps: every phase lasts.
ENGINE: dict[str, Any] = {
    "max_model_len": 4000,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_kv_blocks": 1024,
}


class Watch:
    """What happens to requests that are ended before their time."""

    def __init__(self) -> None:
        self.late: Counter[int] = (
            Counter()
        )  # handle -> tokens of steps that ended since, and how many these were
        self.steps: Counter[int] = Counter()
        self.left: dict[int, float] = {}  # handle -> when the engine had been sent the abort
        self.samples: dict[int, int] = {}
        self.aborts = 0
        self.failures: list[BaseException] = []

    def ending(self, live: LiveRequest) -> None:
        self.left[live.handle] = time.monotonic()
        self.samples[live.handle] = len(live.output.outputs)

    def stepped(self, step: StepReport) -> None:
        keys = unpack_handles(step.rows)
        sizes = unpack_ids(step.sizes) if step.sizes else [1] * len(keys)
        late = {key >> SAMPLE_BITS for key in keys if self.left.get(key >> SAMPLE_BITS, step.end) < step.end}
        self.steps.update(late)
        for key, size in zip(keys, sizes, strict=True):
            if key >> SAMPLE_BITS in late:
                self.late[key >> SAMPLE_BITS] += size

    def aborted(self, loop: EngineLoop) -> None:
        """The engine has taken an abort, between two steps: every held block is a running sequence's."""
        self.aborts += 1
        scheduler = loop._core.scheduler
        try:
            scheduler.audit()
            assert scheduler.has_work() or scheduler.blocks_used == 0
        except BaseException as error:  # shown where the test looks: this is the engine's thread
            self.failures.append(error)

    def check(self) -> None:
        assert not self.failures, self.failures[0]
        assert all(self.late[handle] <= samples for handle, samples in self.samples.items()), self.late
        assert all(count <= 1 for count in self.steps.values()), self.steps


@pytest.fixture(scope="module")
def watched(folder: Path) -> Iterator[tuple[LiveServer, Watch]]:
    watch = Watch()
    end, stepped, obey = AsyncEngine._end, AsyncEngine.stepped, EngineLoop._obey

    def watched_end(self: AsyncEngine, live: LiveRequest, error: Any = None) -> None:
        known = live.handle in self._live
        end(self, live, error)
        if known:
            watch.ending(live)

    def watched_step(self: AsyncEngine, step: StepReport) -> None:
        watch.stepped(step)
        stepped(self, step)

    def watched_obey(self: EngineLoop, command: Any) -> None:
        obey(self, command)
        if isinstance(command, Abort):
            watch.aborted(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncEngine, "_end", watched_end)
        patch.setattr(AsyncEngine, "stepped", watched_step)
        patch.setattr(EngineLoop, "_obey", watched_obey)
        with serving(folder, ENGINE) as live:
            yield live, watch


def prompt_of(phase: str, rng: random.Random) -> list[int]:
    length = rng.randint(80, 160) if phase == "prefilling" else rng.randint(1, 20)
    return [rng.randint(4, 100) for _ in range(length)]


def reached(phase: str, live: LiveRequest) -> bool:
    """Whether a request is in a phase, or past it."""
    times = live.output.timings
    return {
        "waiting": True,
        "prefilling": times.scheduled > 0,
        "decoding": times.first_token > 0,
        "streaming": live.output.usage.completion_tokens > 3,
        "finished": live.output.finished,
    }[phase]


def phase_of(live: LiveRequest) -> str:
    times = live.output.timings
    if live.output.finished:
        return "finished"
    return "decoding" if times.first_token else "prefilling" if times.scheduled else "waiting"


def settle(server: LiveServer, watch: Watch) -> None:
    server.wait(server.idle)
    assert server.engine.stats.blocks_used == 0
    watch.check()


@contextlib.contextmanager
def crowd(server: LiveServer, phase: str) -> Iterator[None]:
    """All places taken, where the one that leaves is to wait."""
    if phase != "waiting":
        yield
        return
    body = {"prompt": "on", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(server.connect()).sendall(request_bytes("/v1/completions", body))
        server.wait(lambda: server.engine.stats.running == 4)
        yield


def hang_up(server: LiveServer, phase: str, rng: random.Random) -> None:
    """Ask, wait for the phase, and close or reset the connection."""
    body = {"prompt": prompt_of(phase, rng), "n": rng.choice([1, 1, 3]), "ignore_eos": True, "temperature": 1.0,
            "stream": phase == "streaming" or rng.random() < 0.5,
            "max_tokens": rng.randint(1, 4) if phase == "finished" else 3000}  # fmt: skip
    with crowd(server, phase):
        lives = server.engine._live
        before = set(lives)
        sock = server.connect()
        sock.sendall(request_bytes("/v1/completions", body))
        if phase == "finished":
            assert sock.recv(1, socket.MSG_PEEK)
            server.wait(lambda: not lives)
        else:
            server.wait(lambda: any(reached(phase, lives[handle]) for handle in set(lives) - before))
        if rng.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        server.wait(lambda: set(lives) <= before)


@LEAVERS
def test_clients_that_hang_up(watched: tuple[LiveServer, Watch], leavers: int) -> None:
    server, watch = watched
    rng = random.Random(1)
    for number in range(leavers):
        hang_up(server, PHASES[number % len(PHASES)], rng)
        settle(server, watch)
    assert watch.aborts >= leavers * (len(PHASES) - 1) // len(PHASES)


@LEAVERS
def test_callers_that_cancel(watched: tuple[LiveServer, Watch], leavers: int) -> None:
    """Several at once, which end in whatever phase they have come to."""
    server, watch = watched
    rng = random.Random(2)
    seen: Counter[str] = Counter()

    async def leave(number: int, wave: int) -> None:
        phase = rng.choice(PHASES)
        params = SamplingParams(n=rng.choice([1, 1, 3]), ignore_eos=True,
                                max_tokens=rng.randint(1, 4) if phase == "finished" else 3000)  # fmt: skip
        request = Request(
            request_id=f"{leavers}-{wave}-{number}",
            prompt_token_ids=TokenIds(prompt_of(phase, rng)),
            params=params,
        )
        stream = server.engine.generate(GenerateAsk(request=request))
        live = stream._live  # type: ignore[attr-defined]
        deadline = time.monotonic() + rng.choice([0.0, 0.1, 2.0])
        while not reached(phase, live) and time.monotonic() < deadline:
            if phase == "streaming":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.05)
            else:
                await asyncio.sleep(0.002)
        seen[phase_of(live)] += 1
        if rng.random() < 0.5:
            stream.cancel()
        del stream  # dropped, it cancels itself

    async def wave(first: int) -> None:
        await asyncio.gather(*(leave(number, first) for number in range(10)))

    for first in range(leavers // 10):
        asyncio.run_coroutine_threadsafe(wave(first), server.loop).result(GUARD)
        settle(server, watch)
    print(dict(seen))
    assert sum(seen.values()) == leavers
