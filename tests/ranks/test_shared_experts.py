"""Replicas that hold the experts of a model between them: each has the bits of one that is alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.ranks import CHUNKS, LIMITS, native, prompts, same
from helpers.specs import BF16, moe_spec
from helpers.stepper import Stepper
from quire import _native
from quire.engine.host.replica_files import ReplicaFiles
from quire.executor.expert_replicas import ExpertReplicas, shown_bytes
from quire.loader import LoadRules, RandomWeights, load
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.ranks import RankPlan
from quire.spec import Router
from quire.types import UnsupportedModelError
from ranks.test_equal_bits import EXPERTS, FORMATS, outputs


class Sharing:
    """So many replicas, of `size` ranks each, in threads; each with steps of its own."""

    def __init__(self, formats: NumberFormats, replicas: int, size: int) -> None:
        whole = lower(EXPERTS, formats)
        rules = LoadRules().of_rank(whole.params)
        self.shared = _native.LocalGroup(replicas * size, uneven=True)
        self.steppers = [Stepper(whole, LIMITS) for _ in range(replicas)]
        self.executors: list[list[Any]] = []
        self.shown: list[np.ndarray] = []
        for number, stepper in enumerate(self.steppers):
            group, ranks = _native.LocalGroup(size), []
            for rank in range(size):
                plan = RankPlan(
                    size, rank, expert_parallel=True, data_parallel_size=replicas, data_parallel_rank=number
                )
                executor = native(lower(EXPERTS, formats, plan))
                load(executor.program.params, RandomWeights(whole.params), executor, rules=rules)
                executor.bind(LIMITS, stepper.arrays)
                if size > 1:
                    executor.join(group)
                shown = np.zeros(shown_bytes(executor.program, LIMITS), np.uint8)
                self.shown.append(shown)
                executor.core.share_experts(self.shared, number * size + rank, shown.ctypes.data)
                ranks.append(executor)
            self.executors.append(ranks)

    def logits(self, turns: list[int]) -> list[list[dict[str, np.ndarray]]]:
        """Outputs of each replica by its steps. In round n those replicas run one whose turn n is, or the others."""
        runs = [self._steps(stepper, turn) for stepper, turn in zip(self.steppers, turns, strict=True)]
        found: list[list[dict[str, np.ndarray]]] = [[] for _ in self.steppers]
        with ThreadPoolExecutor(len(self.shown)) as threads:
            for sizes in zip(*runs, strict=True):
                futures = [
                    [threads.submit(_run, executor, size, self.shared) for executor in ranks]
                    for ranks, size in zip(self.executors, sizes, strict=True)
                ]
                for number, size in enumerate(sizes):
                    first, *others = [each.result() for each in futures[number]]
                    for other in others:
                        same(first, other)
                    if size is not None:
                        found[number].append(first)
        return found

    @staticmethod
    def _steps(stepper: Stepper, idle: int) -> Any:
        """The steps of a replica, that sits out so many rounds at the start, and the rest at the end."""
        numbers = [stepper.add(each) for each in prompts(EXPERTS.vocab)]
        for _ in range(idle):
            yield None
        for counts in CHUNKS:
            size = stepper.fill({n: count for n, count in zip(numbers, counts, strict=True) if count})
            stepper.arrays.logit_rows[: size.num_tokens] = range(size.num_tokens)
            yield size
        for _ in range(2 - idle):
            yield None


def _run(executor: Any, size: Any, group: Any) -> dict[str, np.ndarray]:
    try:
        if size is None:
            executor.run_idle()
            return {}
        made = executor.run(size.num_tokens, size.num_rows, size.num_tokens)
        return {name: rows.copy() for name, rows in made.items()}
    except BaseException:
        group.leave()
        raise


@pytest.mark.parametrize(
    ("formats", "replicas", "size"), [("bf16", 2, 1), ("i8", 3, 1), ("i4-rotated", 2, 2), ("f32", 5, 1)]
)
def test_replicas_have_the_bits_of_one(formats: str, replicas: int, size: int) -> None:
    """Also in rounds in which others have no step, or another one; two tensor ranks hold columns of the rest."""
    alone = outputs(EXPERTS, FORMATS[formats], 1)
    for found in Sharing(FORMATS[formats], replicas, size).logits([n % 3 for n in range(replicas)]):
        for one, other in zip(alone, found, strict=True):
            same(one, other)


@pytest.mark.parametrize("formats", ["bf16", "i8"])
def test_a_step_whose_others_have_left_fails(formats: str) -> None:
    """It computes no experts, of rows that nobody has shown."""
    sharing = Sharing(FORMATS[formats], 2, 1)
    size = next(sharing._steps(sharing.steppers[0], 0))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(sharing.executors[0][0].run, size.num_tokens, size.num_rows, size.num_tokens)
        sharing.shared.leave()
        with pytest.raises(RuntimeError, match="ranks came apart"):
            running.result()


def test_waits_of_rounds_without_a_step_are_not_counted() -> None:
    files, plan = ReplicaFiles(2), RankPlan(expert_parallel=True, data_parallel_size=2)
    executor = native(lower(EXPERTS, BF16, plan))
    held, path = executor.held_experts, files.join(0)
    replicas = ExpertReplicas(path, [executor.program], 0, LIMITS, held, crowded=True)
    for steps, waited, counted in ((True, 3, 3), (False, 50, 3), (False, 60, 3), (True, 4, 7), (True, 0, 7)):
        replicas.begin(steps=steps)
        replicas.ranks.wait_more(waited * 10**9)
        assert replicas.waited == replicas.waited == counted
    files.close()


def test_each_expert_is_held_once() -> None:
    plans = [
        RankPlan(2, t, expert_parallel=True, data_parallel_size=3, data_parallel_rank=d)
        for d in range(3)
        for t in (0, 1)
    ]
    shares = [plan.experts(128, 8) for plan in plans]
    assert [each.start for each in shares] == [0, *(each.stop for each in shares[:-1])]
    assert shares[-1].stop == 128
    assert all(not plan.experts(128, 2).total > 128 for plan in plans)
    with pytest.raises(
        UnsupportedModelError,
        match=r"6 ranks cannot share num_experts 5: .* tensor_parallel_size times data_parallel_size can be 5 at most",
    ):
        lower(EXPERTS, BF16, replace(plans[0]))


def test_without_experts_nothing_is_shared() -> None:
    program = lower(moe_spec(Router(4, 2), 64), BF16, RankPlan(expert_parallel=True))
    assert shown_bytes(program, LIMITS) == 0
