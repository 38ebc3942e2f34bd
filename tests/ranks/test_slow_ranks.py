"""A rank that is slow, and not gone: it is stopped and goes on again at random moments. Everybody waits for it, and
nothing else changes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.rank_nodes import environment, following, fresh_address
from helpers.rank_processes import COMMON, Wide, answers, make
from helpers.torch_ranks import TORCH, same_answers
from quire import LLM, SamplingParams
from quire.executor.ranked import SharedStep
from quire.util.platform import started_by

PAUSES = 12
SLOW = pytest.mark.ranks
PLANS: dict[str, dict[str, Any]] = {
    "columns": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "torch": {**TORCH, "tensor_parallel_size": 2},
}


@contextmanager
def slow(pids: list[int], seed: int = 0) -> Iterator[threading.Thread]:
    """One of these processes at a time is stopped for a moment, a dozen times; shorter than what counts as hanging."""
    chance = random.Random(seed)

    def pause() -> None:
        for _ in range(PAUSES):
            time.sleep(chance.uniform(0.0, 0.1))
            pid = chance.choice(pids)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(chance.uniform(0.02, 0.4))
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()


def answer_while(thread: threading.Thread, llm: LLM, alone: list[Any], *, exact: bool) -> None:
    """Ask until the pauses are over."""
    while thread.is_alive():
        found = answers(llm)
        if exact:
            assert found == alone
        else:
            same_answers(found, alone)


@pytest.mark.parametrize(
    "plan", ["columns", *(pytest.param(each, marks=SLOW) for each in ("stages", "both", "torch"))]
)
def test_answers_are_the_same(wide: Wide, plan: str) -> None:
    options = TORCH if plan == "torch" else {}
    with make(wide("qwen3"), **options) as llm:
        alone = answers(llm)
    with make(wide("qwen3"), **PLANS[plan]) as llm:
        assert llm.built.ranks is not None
        with slow([*llm.built.ranks.pids.values()]) as thread:
            answer_while(thread, llm, alone, exact=plan != "torch")


@pytest.mark.ranks
def test_a_slow_host_and_its_rank(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    address, ranks = fresh_address(), PLANS["columns"]
    with make(wide("qwen3")) as llm:
        alone = answers(llm)
    for name, value in environment(address, 2).items():
        monkeypatch.setenv(name, value)
    with following(wide("qwen3"), address, 2, COMMON | ranks) as nodes, make(wide("qwen3"), **ranks) as llm:
        with slow([nodes[0].pid, *started_by(nodes[0].pid)]) as thread:
            answer_while(thread, llm, alone, exact=True)
        assert llm.built.ranks is not None
        assert all(waited > 0 for _, waited in llm.built.ranks.worked())


def sleeping() -> bool:
    """Whether all threads of this process but this one sleep."""
    states = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # it has ended meanwhile
            if int(task.name) != threading.get_native_id():
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return all(state == "S" for state in states)


def test_waits_for_a_slow_rank_are_counted(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 does not hear of a step until rank 0 waits for its rows."""
    run, began = SharedStep.run, threading.Event()

    def running(self: SharedStep, *more: Any) -> Any:
        began.set()
        return run(self, *more)

    with make(wide("qwen3"), tensor_parallel_size=2) as llm, ThreadPoolExecutor(1) as threads:
        assert llm.built.ranks is not None
        pid, asked = llm.built.ranks.pids[1], SamplingParams(max_tokens=2, ignore_eos=True)
        llm.generate([[5, 6, 7]], asked)
        before = llm.built.ranks.worked()
        monkeypatch.setattr(SharedStep, "run", running)
        os.kill(pid, signal.SIGSTOP)
        answer = threads.submit(llm.generate, [[5, 6, 7]], asked)
        try:
            began.wait()
            seen = 0
            while seen < 10:
                time.sleep(0.01)
                seen = seen + 1 if sleeping() else 0
            since = time.monotonic()
            time.sleep(0.05)
            stopped = time.monotonic() - since
        finally:
            os.kill(pid, signal.SIGCONT)
        answer.result()
        after = llm.built.ranks.worked()
    assert after[0][1] - before[0][1] >= stopped
    assert all(waited <= worked for worked, waited in after)
