"""Steps that share sequences give each of them a turn, also where no two of them overlap."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from quire.cache_kinds import Move
from quire.core.scheduler import Scheduler
from quire.engine.core import EngineCore
from quire.types import Request, SchedulerOutput, SoftSpan, StepOutput, TokenIds

from .scheduling import answer, ask, make, run

TURNS = {
    "num_blocks": 400,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 400,
    "steps_in_flight": 2,
    "takes_turns": True,
}
STEPS = 120


class Idle:
    """A worker that computes nothing: each row that samples gives one token. It counts steps that overlap."""

    plans = SimpleNamespace()

    def __init__(self) -> None:
        self.overlapped = 0
        self.rows: list[int] = []

    def begin(self, out: SchedulerOutput) -> None:
        pass

    def count(self, added: object) -> None:
        pass

    def forward(self, out: SchedulerOutput, beside: SchedulerOutput | None = None) -> None:
        self._out = out
        self.rows.append(len(out.scheduled))
        self.overlapped += beside is not None

    def sample(self, masks: object = None) -> StepOutput:
        return answer(self._out, [[7] if row.sample else [] for row in self._out.scheduled])


def widest_gap(core: EngineCore, requests: list[Request]) -> int:
    """By how many tokens one sequence was ever behind another, in steps of requests with prompts of one length."""
    counts = dict.fromkeys((request.request_id for request in requests), 0)
    for request in requests:
        core.add(request)
    gap = 0
    for _ in range(STEPS):
        for event in core.step():
            counts[event.request_id] += len(event.new_token_ids)
        gap = max(gap, max(counts.values()) - min(counts.values()))
    assert min(counts.values()) > STEPS // 2 - 3, counts
    core.scheduler.audit()
    return gap


def requests(count: int) -> list[Request]:
    return [ask(f"r{i}", [5 + i] * 20, max_tokens=300, ignore_eos=True, temperature=0) for i in range(count)]


def moving(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, moves: Callable[[], bool]) -> None:
    """A store that takes a block in a step if `moves`."""
    caches = scheduler.caches

    def save(*, idle: bool) -> None:
        if moves():
            caches.moves.append(Move(0, b"d" * 16, 0, fill=False))

    monkeypatch.setattr(caches, "save", save)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_with_moves_in_every_step_all_run_in_each(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    scheduler, worker = make(**TURNS), Idle()
    moving(scheduler, monkeypatch, lambda: True)
    assert widest_gap(EngineCore(scheduler, worker), requests(count)) <= 2
    assert not worker.overlapped
    assert worker.rows[2:] == [count] * (STEPS - 2)


@pytest.mark.parametrize("often", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("count", [3, 4, 7])
def test_with_moves_in_some_steps_none_falls_behind(
    monkeypatch: pytest.MonkeyPatch, count: int, often: float
) -> None:
    chance, scheduler, worker = random.Random(count), make(**TURNS), Idle()
    moving(scheduler, monkeypatch, lambda: chance.random() < often)
    assert widest_gap(EngineCore(scheduler, worker), requests(count)) <= 3
    assert worker.overlapped or often > 0.5


@pytest.mark.parametrize("period", [2, 3, 4])
def test_with_moves_at_a_beat_none_falls_behind(monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    steps, scheduler = iter(range(10**6)), make(**TURNS)
    moving(scheduler, monkeypatch, lambda: next(steps) % period == 0)
    assert widest_gap(EngineCore(scheduler, Idle()), requests(4)) <= 3


def test_steps_after_the_soft_tokens_of_a_prompt_overlap() -> None:
    worker, all_of_them = Idle(), requests(4)
    all_of_them[0] = Request(
        request_id="r0",
        prompt_token_ids=TokenIds([5] * 20),
        params=all_of_them[1].params,
        soft_tokens=(SoftSpan(0, 4, b"x" * 32),),
    )
    assert widest_gap(EngineCore(make(**TURNS, soft_tokens=True), worker), all_of_them) <= 2
    assert worker.overlapped > STEPS - 5


@pytest.mark.parametrize("seed", range(30))
def test_each_step_runs_a_token_while_there_is_work(seed: int) -> None:
    """Also where all that has its turn waits for blocks of those that had one."""
    chance = random.Random(seed)
    blocks, slots = chance.randint(6, 12), chance.randint(2, 6)
    scheduler = make(
        num_blocks=blocks, max_num_seqs=slots, max_model_len=24, steps_in_flight=2, takes_turns=True
    )
    for i in range(chance.randint(2, 8)):
        prompt, most = [5 + i] * chance.randint(1, 9), chance.randint(2, 14)
        scheduler.add(ask(f"r{i}", prompt, max_tokens=most, ignore_eos=True, arrival=i))
    steps = 0
    while scheduler.has_work():
        scheduler.turns, steps = chance.random() < 0.8, steps + 1
        assert run(scheduler)[0].scheduled
        assert steps < 1000
    scheduler.audit()
