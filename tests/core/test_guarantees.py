"""Guaranteed deadlines: kept whatever answers turn out to be, by the real scheduler and admission at virtual time."""

from __future__ import annotations

import random

import pytest

from quire.bench.simulated_server import Arrival, SimulatedRun, SimulatedServer
from quire.core.scheduler_config import SchedulerConfig
from quire.objectives import ServiceClass

COSTS = (0.012, 4e-4, 3e-4, 2e-7, 4e-9, 0.0, 0.0, 0.0)
MOST = 80  # tokens of an answer
SURE, REST = 0, 1


def arrivals(seed: int, rate: float, count: int = 240) -> list[Arrival]:
    """Of two classes with deadlines. Answers are short at first, as is then expected; later most have all their
    tokens. Lengths are known of the second class alone."""
    rng, at, made = random.Random(seed), 0.0, []
    for index in range(count):
        at += rng.expovariate(rate)
        prompt = rng.choices(range(5000), k=int(rng.lognormvariate(4.8, 0.8)) + 1)
        short = index < count // 2 or rng.random() < 0.2
        output = rng.randint(1, 12) if short else MOST
        sure = rng.random() < 0.4
        deadline = rng.uniform(1.0, 6.0) if sure else 1.5 + 0.05 * output
        made.append(
            Arrival(at, prompt, output, SURE if sure else REST, known=not sure, deadline=deadline, most=MOST)
        )
    return made


def serve(asked: list[Arrival], *, guaranteed: bool, policy: str, **limits: int) -> SimulatedRun:
    values = {"num_blocks": 400, "max_num_seqs": 12, "max_num_batched_tokens": 256} | limits
    config = SchedulerConfig(max_model_len=4096, policy=policy, **values)
    classes = [ServiceClass("sure", guaranteed=guaranteed), ServiceClass("rest")]
    return SimulatedServer(config, COSTS, classes, admits=True).run(asked)


def missed(run: SimulatedRun, asked: list[Arrival], which: int) -> tuple[int, int]:
    """Requests of a class that ended too late, and those admitted."""
    there = [one for one in run.records if not one.failed and asked[one.index].service_class == which]
    late = [
        one for one in there if (one.finished or 0.0) - one.scheduled > (asked[one.index].deadline or 0.0)
    ]
    return len(late), len(there)


@pytest.mark.parametrize("policy", ["edf", "fcfs"])
def test_a_guaranteed_deadline_is_kept_and_hardly_another_is_missed(policy: str) -> None:
    totals = [0, 0, 0, 0]
    for seed in range(6):
        asked = arrivals(seed, rate=(2.0, 5.0, 12.0)[seed % 3])
        run = serve(asked, guaranteed=True, policy=policy)
        totals = [
            sum(both)
            for both in zip(totals, missed(run, asked, SURE) + missed(run, asked, REST), strict=True)
        ]
    late, sure, others_late, others = totals
    assert late == 0
    assert others_late <= 0.01 * others
    assert sure > 100
    assert others > 200


def test_without_the_guarantee_some_are_missed() -> None:
    """The control: predicted by what was usual, answers that are longer than ever end too late."""
    late = 0
    for seed in range(6):
        asked = arrivals(seed, rate=(2.0, 5.0, 12.0)[seed % 3])
        late += missed(serve(asked, guaranteed=False, policy="edf"), asked, SURE)[0]
    assert late > 5
