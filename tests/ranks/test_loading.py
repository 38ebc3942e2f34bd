"""A rank reads its own ranges of the checkpoint, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from helpers.specs import F32, decoder_spec, moe_spec
from quire.executor.torch import TorchExecutor
from quire.loader import LoadRules, RandomWeights, TensorInfo, load
from quire.loader.source import Array
from quire.program.lower import lower
from quire.program.ranks import RankPlan
from quire.spec import ModelSpec, QKNorm, Router
from quire.types import CheckpointError

DENSE = decoder_spec(330, 256, 328, (8, 4, 32), [0, 0], qk_norm=True, bias=True)
EXPERTS = replace(moe_spec(Router(6, 2), 256, dim=256), vocab=330)


class Counting:
    """RandomWeights that count the bytes which are read. Implements Source."""

    def __init__(self, spec: ModelSpec) -> None:
        self._source = RandomWeights(lower(spec, F32).params)
        self.read_bytes = 0

    def names(self) -> Iterable[str]:
        return self._source.names()

    def info(self, name: str) -> TensorInfo:
        return self._source.info(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        found = self._source.read(name, start, stop)
        self.read_bytes += found.nbytes
        return found

    def release(self, name: str) -> None:
        """There is nothing to release."""


def loaded(spec: ModelSpec, plan: RankPlan) -> tuple[TorchExecutor, int]:
    """A rank with its weights, and the bytes that it has read."""
    source, executor = Counting(spec), TorchExecutor(lower(spec, F32, plan))
    rules = LoadRules().of_rank(lower(spec, F32).params)
    summary = load(executor.program.params, source, executor, rules=rules)
    assert plan.fast or summary.nbytes == source.read_bytes  # columns of rows are read with the rows
    return executor, source.read_bytes


@pytest.mark.parametrize(("size", "stages"), [(3, 1), (1, 2), (2, 2)])
def test_ranks_read_the_checkpoint_once(size: int, stages: int) -> None:
    plans = [RankPlan(size, rank, stages, stage) for stage in range(stages) for rank in range(size)]
    read = [loaded(DENSE, plan)[1] for plan in plans]
    params = lower(DENSE, F32).params
    everywhere = {"norm", "o.bias", "down.bias"}
    vectors = 2 * sum(
        param.rows for param in params if param.kind == "vector" and param.name.endswith(tuple(everywhere))
    )
    whole = sum(2 * param.rows * max(param.cols, 1) for param in params)
    assert whole <= sum(read) <= whole + (size - 1) * vectors
    assert max(read) < 1.4 * whole / len(plans)


def test_ranks_of_experts_read_their_own() -> None:
    whole = loaded(EXPERTS, RankPlan())[1]
    for whole_experts in (False, True):
        for rank in range(2):
            assert loaded(EXPERTS, RankPlan(2, rank, expert_parallel=whole_experts))[1] < 0.52 * whole


def test_a_range_of_columns() -> None:
    """Partial sums take columns of a tensor; each rank gets those of its own inputs."""
    one = loaded(DENSE, RankPlan())[0]._weights
    for rank in range(2):
        program = lower(DENSE, F32, RankPlan(2, rank, reduce="fast"))
        [part] = program.param("layers.1.o").parts
        assert (part.first_col, part.cols, part.shape) == (128 * rank, 128, (256, 256))
        mine = loaded(DENSE, RankPlan(2, rank, reduce="fast"))[0]._weights
        np.testing.assert_array_equal(
            mine["layers.1.o"], one["layers.1.o"][:, part.first_col : part.first_col + part.cols]
        )


def test_a_range_of_a_vector_that_is_stored_as_a_matrix() -> None:
    norms = QKNorm(DENSE.norm, shared=False)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, qk_norm=norms)) for layer in DENSE.layers)
    spec = replace(DENSE, layers=layers, norm=replace(DENSE.norm, added=1.0))
    for rank in range(2):
        [part] = lower(spec, F32, RankPlan(2, rank)).param("layers.0.q_norm").parts
        assert (part.first, part.rows, part.shape) == (128 * rank, 128, (8, 32))
        loaded(spec, RankPlan(2, rank))


def test_a_tensor_of_no_rank_is_still_refused() -> None:
    source = Counting(decoder_spec(330, 256, 328, (8, 4, 32), [0, 0, 0], qk_norm=True, bias=True))
    executor = TorchExecutor(lower(DENSE, F32, RankPlan(2)))
    rules = LoadRules().of_rank(lower(DENSE, F32).params)
    with pytest.raises(CheckpointError, match=r"tensors that its config does not imply: .*layers.2"):
        load(executor.program.params, source, executor, rules=rules)
