"""Steps planned ahead: which steps find a plan, and what is counted."""

from __future__ import annotations

import pytest

from quire.executor.plans import MAX_PREPARED_ROWS, PlanCounts, StepPlans, StepSize, decode_sizes


def test_a_step_finds_the_plan_of_its_own_size_only() -> None:
    made: list[StepSize] = []
    plans: StepPlans[StepSize] = StepPlans()
    plans.prepare(decode_sizes(4), lambda size: made.append(size) or size)
    plans.prepare(decode_sizes(2), lambda size: made.append(size) or size)  # they exist
    assert made == [(n, n, n) for n in (1, 2, 3, 4)]
    assert plans.find(3, 3, 3) == (3, 3, 3)
    for other in ((5, 5, 5), (6, 3, 3), (3, 3, 0), (3, 1, 1)):
        assert plans.find(*other) is None
    assert plans.counts == PlanCounts(4, 1, 4, 0)


def test_padding_takes_the_smallest_larger_size_of_the_same_shape() -> None:
    plans: StepPlans[StepSize] = StepPlans(pads=True)
    plans.prepare([StepSize(n, n, n) for n in (8, 1, 4)] + [StepSize(8, 2, 8)], lambda size: size)
    assert plans.find(4, 4, 4) == (4, 4, 4)
    assert plans.find(5, 5, 5) == (8, 8, 8)
    assert plans.find(4, 1, 4) == (8, 2, 8)  # three drafts a row
    for other in ((9, 9, 9), (5, 4, 4), (12, 3, 12), (3, 1, 3)):
        assert plans.find(*other) is None
    assert plans.counts == PlanCounts(4, 3, 4, 3 + 1)


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (64, 64), (1000, MAX_PREPARED_ROWS)])
def test_decode_sizes_end_where_a_plan_gains_nothing(rows: int, count: int) -> None:
    sizes = decode_sizes(rows)
    assert len(sizes) == count
    assert sizes[-1] == (count, count, count)
