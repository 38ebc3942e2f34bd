"""Experts of replicas that share them change places while requests run: the bits of one process, whatever moves."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.memory import memory_for_replicas
from helpers.rank_processes import Wide, answers, answers_of_replicas, make
from helpers.ranks import LIMITS, native
from helpers.specs import BF16
from helpers.stepper import Stepper
from quire.executor import expert_rounds
from quire.executor.expert_places import HeldExperts
from quire.executor.expert_rounds import RoundExchanges, SharedLoads, exchange_bytes
from quire.llm import asynchronous
from quire.program.lower import lower
from quire.program.ranks import RankPlan
from quire.worker.expert_balance import ExpertBalance
from ranks.test_equal_bits import EXPERTS

SHARED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}


def move_at_random(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Of replicas in threads: two experts of any ranks change as often as they can; returns those, as they grow."""
    chance = random.Random(3)
    moved: list[tuple[int, int, int]] = []

    def step(self: ExpertBalance) -> None:
        experts = self._executor.experts
        if experts.move:
            layer, at = chance.choice([*experts.placed.items()])
            one, other = chance.sample(range(len(at)), 2)
            experts.swap(layer, one, other)
            moved.append((layer, one, other))

    monkeypatch.setattr(ExpertBalance, "step", step)
    monkeypatch.setattr(expert_rounds, "_SHARE", 1e9)  # of the time
    serving = partial(asynchronous.serving_engine, in_process=True)
    monkeypatch.setattr(asynchronous, "serving_engine", serving)
    return moved


@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        ("qwen3-moe", {"quantization": "int8"}, {}),
        pytest.param("mixtral", {"dtype": "bfloat16"}, {"tensor_parallel_size": 2}, marks=pytest.mark.ranks),
        pytest.param("gpt-oss", {"quantization": "int4"}, {"pipeline_parallel_size": 2}, marks=pytest.mark.ranks),
    ],
)  # fmt: skip
def test_answers_are_those_of_one_process(
    wide: Wide, name: str, options: dict[str, Any], ranks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(wide(name), **options) as llm:
        alone = answers(llm)
    moved = move_at_random(monkeypatch)
    memory = memory_for_replicas(2**30)
    assert answers_of_replicas(wide(name), memory=memory, **options, **SHARED, **ranks) == alone
    assert len(moved) > 2


@pytest.mark.ranks
def test_routers_must_know(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: weights change places, and routers are not told."""
    with make(wide("qwen3-moe")) as llm:
        alone = answers(llm)
    move_at_random(monkeypatch)
    monkeypatch.setattr(HeldExperts, "put", lambda self, layer, placed: None)
    memory = memory_for_replicas(2**30)
    assert answers_of_replicas(wide("qwen3-moe"), memory=memory, **SHARED) != alone


class Replicas:
    """Two replicas of one rank, without their programs."""

    def __init__(self) -> None:
        self.each: list[SharedLoads] = []
        plans = [
            RankPlan(1, 0, expert_parallel=True, data_parallel_size=2, data_parallel_rank=n) for n in (0, 1)
        ]
        programs = [lower(EXPERTS, BF16, plan) for plan in plans]
        memory = np.zeros(exchange_bytes(programs[:1]), np.uint8)
        for program in programs:
            executor = native(program)
            executor.bind(LIMITS, Stepper(program, LIMITS).arrays)
            held = executor.held_experts
            self.each.append(SharedLoads(held, RoundExchanges(held, [program], memory)))
        self._entered = 0

    def round(self) -> None:
        """One round, that the first replica begins."""
        self._entered += 1
        for loads in self.each:
            loads._exchanges.begin()
            loads._exchanges.enter(self._entered)


def test_two_change_in_the_third_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_rounds, "_SHARE", 1e9)
    replicas = Replicas()
    first, other = replicas.each
    assert first.move
    assert not other.move  # it does not choose
    layer, before = next(iter(first.placed.items()))
    last, start = len(before) - 1, [*before]
    first.swap(layer, 0, last)
    assert not first.move
    swapped = [start[last], *start[1:last], start[0]]
    for after in (start, start, swapped, swapped):
        replicas.round()
        assert all(each._exchanges._held.placed[layer] == after for each in replicas.each)
        assert first.placed[layer] == swapped
    assert first.move


def test_the_first_replica_knows_the_loads_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas()
    for number, each in enumerate(replicas.each):
        own = {layer: np.arange(len(at)) + 10 * number for layer, at in each.placed.items()}
        monkeypatch.setattr(each._own, "take_pairs", lambda own=own: own)
    first, other = replicas.each
    assert not any(pairs.any() for pairs in other.take_pairs().values())
    for pairs in first.take_pairs().values():
        assert pairs.tolist() == [10 + 2 * place for place in range(len(pairs))]
    for pairs in first.take_pairs().values():
        assert pairs.tolist() == [*range(len(pairs))]
