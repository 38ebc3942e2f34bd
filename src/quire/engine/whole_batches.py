"""Whole batches: a batch is admitted when nothing runs, and no sequence joins until all of it has ended.

For comparison with continuous batching: static batching waits until a batch is full; dynamic batching until it is full
or its first request has waited long enough.
"""

from __future__ import annotations

import math
import random

from quire.core.cached_prefix import Hit
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import Sequence
from quire.core.service_estimates import TokenCosts
from quire.core.step_plan import StepPlan
from quire.core.tier import Tier
from quire.records import dataclass


class WholeBatchScheduler(Scheduler):
    """Admits only sequences that waited when the running batch began. How long to collect it is a BatchGate's."""

    def __init__(
        self,
        config: SchedulerConfig,
        rng: random.Random | None = None,
        tier: Tier | None = None,
        costs: TokenCosts | None = None,
    ) -> None:
        super().__init__(config, rng, tier, costs)
        self._places = 0  # for sequences of the batch that have not started

    def oldest_arrival(self) -> float | None:
        """Arrival of the request that has waited longest in the queue; None for an empty queue. O(waiting)."""
        return min((seq.state.request.arrival for seq in self._waiting), default=None)

    def _admit_waiting(self, step: StepPlan) -> None:
        if not self._running:
            self._places = min(len(self._waiting), self.config.max_num_seqs)
        super()._admit_waiting(step)

    def _may_have_slots(self, seq: Sequence, count: int) -> bool:
        return self._places >= count and super()._may_have_slots(seq, count)

    def _start(self, seq: Sequence, hit: Hit, step: StepPlan) -> None:
        super()._start(seq, hit, step)
        self._places -= 1

    def _preempt_one(self, seq: Sequence, step: StepPlan) -> None:
        super()._preempt_one(seq, step)
        self._places += 1  # it keeps its place in the batch


@dataclass(frozen=True, slots=True)
class BatchGate:
    """When the next batch of a scheduler may start. `size` sequences make it full; `wait` seconds after its first one
    arrived it starts anyway (inf: never).
    """

    queue: WholeBatchScheduler
    size: int
    wait: float = math.inf

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"max_num_seqs: {self.size} is not at least 1")
        if not self.wait >= 0:
            raise ValueError(f"batch_wait_ms: {1e3 * self.wait:g} is below 0")

    def opens(self) -> float:
        """The time from which the next step may run: -inf for at once, inf for not before more requests come."""
        queue = self.queue
        if queue.num_running or queue.num_waiting >= self.size:
            return -math.inf
        oldest = queue.oldest_arrival()
        return math.inf if oldest is None else oldest + self.wait
