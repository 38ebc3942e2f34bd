"""The time of a step by stage: embedding, layers, projection, from what an executor measures op by op."""

from __future__ import annotations

from quire.executor.base import Inspectable
from quire.program.op import reads
from quire.program.program import Program


class StageTimes:
    """Sums over the ops of each stage; without cost while it is off. Projection is the head: from
    the last hidden states to logits, of the rows that want some.
    """

    def __init__(self, executor: Inspectable, program: Program) -> None:
        self._executor = executor
        # Rows of embeddings are made of token ids alone.
        body = [1 if reads(op) else 0 for op in program.body]
        self._stages = [*body, *(2 for _ in program.head)]
        self.on = False

    def switch(self, on: bool) -> None:
        """Measure later steps, or stop measuring."""
        if on != self.on:
            self._executor.profile(on)
            self._executor.take_profile()  # what a step before has left
            self.on = on

    def take(self) -> tuple[float, ...]:
        """Seconds of the three stages since the last call; nothing of an executor that does not measure."""
        seconds, _ = self._executor.take_profile()
        if not seconds:
            return ()
        found = [0.0, 0.0, 0.0]
        for stage, each in zip(self._stages, seconds, strict=True):
            found[stage] += each
        return tuple(found)
