"""When a batch that is being collected may start. Continuous batching needs none of this.

Static batching waits until a batch is full; dynamic batching until it is full or its first request has waited long
enough. What runs once a batch has started is the scheduler's to say (SchedulerConfig.batching).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Collected(Protocol):
    """What a gate looks at: a scheduler."""

    @property
    def num_running(self) -> int:
        """Sequences of the batch that runs."""

    @property
    def num_waiting(self) -> int:
        """Sequences collected for the next one."""

    def oldest_arrival(self) -> float | None:
        """Arrival of the one that has waited longest."""


@dataclass(frozen=True, slots=True)
class BatchGate:
    """`size` sequences make a batch full; `wait` seconds after its first one arrived it starts anyway (inf: never)."""

    size: int
    wait: float = math.inf

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"max_num_seqs: {self.size} is not at least 1")
        if not self.wait >= 0:
            raise ValueError(f"batch_wait_ms: {1e3 * self.wait:g} is below 0")

    def opens(self, queue: Collected) -> float:
        """The time from which the next step may run: -inf for at once, inf for not before more requests come."""
        if queue.num_running or queue.num_waiting >= self.size:
            return -math.inf
        oldest = queue.oldest_arrival()
        return math.inf if oldest is None else oldest + self.wait
