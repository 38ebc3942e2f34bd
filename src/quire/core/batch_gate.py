"""Decides when a batch that is being collected may start. Continuous batching does not need it.

Static batching waits until a batch is full; dynamic batching until it is full or its first request has waited long
enough. The scheduler decides what runs once a batch has started (SchedulerConfig.batching).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Collected(Protocol):
    """The view of a scheduler that a gate needs."""

    @property
    def num_running(self) -> int:
        """Sequences of the running batch."""

    @property
    def num_waiting(self) -> int:
        """Sequences collected for the next batch."""

    def oldest_arrival(self) -> float | None:
        """Arrival of the sequence that has waited longest."""


@dataclass(frozen=True, slots=True)
class BatchGate:
    """`size` sequences fill a batch; it starts anyway `wait` seconds after its first one arrived (inf: never)."""

    size: int
    wait: float = math.inf

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"max_num_seqs: {self.size} is below the minimum of 1")
        if not self.wait >= 0:
            raise ValueError(f"batch_wait_ms: {1e3 * self.wait:g} is negative")

    def opens(self, queue: Collected) -> float:
        """The time from which the next step may run: -inf for now, inf for not before another request arrives."""
        if queue.num_running or queue.num_waiting >= self.size:
            return -math.inf
        oldest = queue.oldest_arrival()
        return math.inf if oldest is None else oldest + self.wait
