"""All ranks of a model in threads of one process, in lock step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from helpers.stepper import Stepper, StepSize
from quire import _native
from quire.executor.base import F32, Limits
from quire.executor.native import NativeExecutor
from quire.executor.torch.group import LocalGroup
from quire.loader import LoadRules, RandomWeights, Source, load
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.program import Program
from quire.program.ranks import RankPlan
from quire.spec import ModelSpec

LIMITS = Limits(max_tokens=40, max_rows=4, max_logit_rows=40, max_len=64, num_blocks=64)
CHUNKS = ((9, 0), (1, 21), (7, 1), (1, 1))  # tokens of two sequences by step: chunks of prompts, and decode


def native(program: Program, threads: int = 1) -> NativeExecutor:
    return NativeExecutor(program, threads=threads)


class Ranks:
    """A model as all its ranks: `stages` pipeline stages of `size` ranks each."""

    def __init__(
        self, spec: ModelSpec, formats: NumberFormats, size: int = 1, stages: int = 1, *,
        make: Callable[[Program], Any] = native, source: Source | None = None, **plan: Any,
    ) -> None:  # fmt: skip
        whole = lower(spec, formats)
        self.size = size
        self.stepper = Stepper(whole, LIMITS)
        self.stages = [
            [make(lower(spec, formats, RankPlan(size, rank, stages, stage, **plan))) for rank in range(size)]
            for stage in range(stages)
        ]
        self.groups: list[Any] = []
        rules = LoadRules().of_rank(whole.params)
        for executors in self.stages:
            natives = isinstance(executors[0], NativeExecutor)
            group = _native.LocalGroup(size) if natives else LocalGroup(size)
            self.groups.append(group)
            for executor in executors:
                load(executor.program.params, source or RandomWeights(whole.params), executor, rules=rules)
                executor.bind(LIMITS, self.stepper.arrays)
                if size > 1:
                    executor.join(group)

    def run(self, size: StepSize) -> list[dict[str, F32]]:
        """The filled step on all ranks; outputs of each rank of the last stage."""
        inputs: Mapping[str, F32] = {}
        found: list[dict[str, F32]] = []
        for executors, group in zip(self.stages, self.groups, strict=True):
            with ThreadPoolExecutor(self.size) as threads:
                runs = [threads.submit(_run, executor, size, inputs, group) for executor in executors]
            found = [run.result() for run in runs]
            inputs = found[0]
        return found

    def logits(self, tokens: Sequence[Sequence[int]]) -> list[dict[str, F32]]:
        """Outputs of every token of two sequences by step, which all ranks of the last stage agree on."""
        numbers = [self.stepper.add(each) for each in tokens]
        steps = []
        for counts in CHUNKS:
            size = self.stepper.fill({n: count for n, count in zip(numbers, counts, strict=True) if count})
            self.stepper.arrays.logit_rows[: size.num_tokens] = range(size.num_tokens)
            first, *others = self.run(size)
            for other in others:
                same(first, other)
            steps.append(first)
        return steps


def _run(executor: Any, size: StepSize, inputs: Mapping[str, F32], group: Any) -> dict[str, F32]:
    try:
        for each in executor.program.inputs:
            executor.write(each.buffer, inputs[each.name])
        made = executor.run(size.num_tokens, size.num_rows, size.num_tokens)
        return {name: rows.copy() for name, rows in made.items()}
    except BaseException:
        group.leave()
        raise


def same(one: Mapping[str, F32], other: Mapping[str, F32]) -> None:
    """Outputs have equal bits."""
    assert one.keys() == other.keys()
    for name, rows in one.items():
        np.testing.assert_array_equal(rows.view(np.uint32), other[name].view(np.uint32), err_msg=name)


def prompts(vocab: int) -> list[list[int]]:
    """Two sequences as CHUNKS takes them; tokens of every part of the vocabulary."""
    counts = [sum(column) for column in zip(*CHUNKS, strict=True)]
    return [
        np.random.default_rng(seed).integers(0, vocab, count).tolist() for seed, count in enumerate(counts)
    ]
