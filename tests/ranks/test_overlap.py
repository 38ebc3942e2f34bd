"""Steps that overlap in a pipeline: the bits of one rank, whatever happens between the halves of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from helpers.rank_processes import Wide, answers, make
from quire import LLM
from quire.executor.base import HalfStep, Outputs
from quire.executor.native_ranks import LeadingExecutor
from quire.executor.ranked import SharedStep


@contextmanager
def counted_halves() -> Iterator[list[int]]:
    """Commands in which two steps ran, and those in which one did."""
    counts, run = [0, 0], LeadingExecutor.run_halves

    def counting(self: LeadingExecutor, first: HalfStep | None, second: HalfStep | None) -> Outputs:
        counts[first is None or second is None] += 1
        return run(self, first, second)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeadingExecutor, "run_halves", counting)
        yield counts


def same_as_one_rank(alone: Any, llm: LLM) -> None:
    with counted_halves() as counts:
        assert answers(llm) == alone
    both, _ = counts
    assert both > 10, counts


@pytest.mark.parametrize("plan", [{"pipeline_parallel_size": 2}], ids=["stages"])
def test_halves_of_two_steps_run_at_once(wide: Wide, plan: dict[str, Any]) -> None:
    with make(wide("qwen3")) as llm:
        alone = answers(llm)
    with make(wide("qwen3"), **plan) as llm:
        same_as_one_rank(alone, llm)


def test_a_half_that_takes_what_the_other_step_left_has_other_bits(
    wide: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the leading rank reads the hand-over of the step beside its own."""
    with make(wide("qwen3")) as llm:
        alone = answers(llm)
    take = SharedStep._take_residual
    monkeypatch.setattr(
        SharedStep,
        "_take_residual",
        lambda self, executor, tokens, twin, same: take(self, executor, tokens, 1 - twin, same=same),
    )
    with make(wide("qwen3"), pipeline_parallel_size=2) as llm:
        assert answers(llm) != alone
