"""One step of a model with pooling: rows of numbers in place of tokens."""

from __future__ import annotations

from typing import cast

import numpy as np

from quire.executor.base import Runnable, Sampler
from quire.program.program import POOLED
from quire.types import FinishReason, NewSeq, StepOutput
from quire.worker.worker import Forwarded, Masks, Worker


class _NoSampler:
    """Samples nothing, and needs no memory."""

    def add(self, slot: int, new: NewSeq) -> None:
        """See Sampler."""

    def drop(self, slot: int) -> None:
        """See Sampler."""


class PoolingWorker(Worker):
    """A worker whose rows end with what the program has pooled."""

    def _make_sampler(self, executor: Runnable) -> Sampler:
        del executor
        return cast("Sampler", _NoSampler())

    def _sample(self, step: Forwarded, masks: Masks | None, result: StepOutput) -> None:
        """Give each row that reaches the end of its text its numbers; a row with NaN or infinity has failed."""
        del masks
        found = step.outputs[POOLED]
        finite = [bool(np.isfinite(row).all()) for row in found]
        for number, row in enumerate(step.arrays.sampling):
            if finite[number]:
                result.pooled[row] = found[number].tobytes()
            else:
                result.failed[row] = FinishReason.ERROR
