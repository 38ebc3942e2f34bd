"""Steps that an executor has planned ahead, by their size.

A decode step of n rows has n tokens and n rows of logits, whatever the sequences: what follows from these three numbers
can be made once. For a CUDA graph that is everything, and it is captured for some sizes only: a step of 5 rows runs the
graph of 8 with three rows of padding, and a step that no graph fits runs op by op.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

MAX_PREPARED_ROWS = 256  # larger batches take so long that a plan gains nothing

Plan = TypeVar("Plan")


class StepSize(NamedTuple):
    """The sizes of a step, as Runnable.run takes them."""

    tokens: int
    rows: int
    logit_rows: int


class PlanCounts(NamedTuple):
    """Prepared sizes; steps that had a plan, and steps that had none; rows that were computed as padding."""

    sizes: int = 0
    hits: int = 0
    fallbacks: int = 0
    padding: int = 0


def decode_sizes(max_rows: int) -> list[StepSize]:
    """The decode steps of up to max_rows rows that are worth a plan."""
    return [StepSize(rows, rows, rows) for rows in range(1, min(max_rows, MAX_PREPARED_ROWS) + 1)]


class PagingCounts(NamedTuple):
    """Bytes of weights in memory, at most, and of all; those that came in since the start, and seconds that steps have
    waited for them."""

    resident: int = 0
    total: int = 0
    paged_in: int = 0
    seconds: float = 0.0


class Paging(Protocol):
    """Who brings weights in and lets them go."""

    @property
    def counts(self) -> PagingCounts:
        """What is in memory, and what has come."""


class StepPlans(Generic[Plan]):
    """Plans by the size of their steps, and a count of the steps that found one.

    With `pads`, a step takes the plan of the smallest larger size that has as many tokens a row.
    """

    def __init__(self, *, pads: bool = False) -> None:
        self._pads = pads
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._sizes: dict[tuple[float, float], list[StepSize]] = {}  # per row: tokens, logit rows
        self._hits = self._fallbacks = self._padding = 0

    def prepare(self, sizes: Sequence[StepSize], make: Callable[[StepSize], Plan]) -> None:
        """Make the plans of these sizes, but for those that exist."""
        for size in sizes:
            if size not in self._plans:
                self._plans[size] = make(size)
                alike = self._sizes.setdefault(_per_row(size), [])
                alike.insert(bisect_left(alike, size), size)

    def find(self, tokens: int, rows: int, logit_rows: int) -> Plan | None:
        """The plan for a step; None if it has to run without one."""
        plan = self._plans.get((tokens, rows, logit_rows))
        if plan is None and self._pads:
            size = StepSize(tokens, rows, logit_rows)
            alike = self._sizes.get(_per_row(size), [])
            at = bisect_left(alike, size)
            if at < len(alike):
                plan = self._plans[alike[at]]
                self._padding += alike[at].rows - rows
        if plan is None:
            self._fallbacks += 1
        else:
            self._hits += 1
        return plan

    @property
    def counts(self) -> PlanCounts:
        return PlanCounts(len(self._plans), self._hits, self._fallbacks, self._padding)


def _per_row(size: StepSize) -> tuple[float, float]:
    return size.tokens / size.rows, size.logit_rows / size.rows
