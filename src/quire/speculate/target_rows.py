"""The features that a step of the target left, by sequence."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import numpy as np

from quire.executor.base import F32, Outputs
from quire.spec.draft import Features
from quire.types import ScheduledSeq

# Of a row of the last step and the tokens added to it: where its known tokens and right drafts are in the outputs.
RightTokens = Callable[[int, ScheduledSeq, Sequence[int]], list[int]]


class TargetRows:
    """`outputs` gives what the last step left, `right_tokens` where in it."""

    def __init__(self, features: Features, outputs: Callable[[], Outputs], right_tokens: RightTokens) -> None:
        self._names = [f"features.{at}" for at in range(len(features.layers))] or ["features"]
        self._outputs, self._right_tokens = outputs, right_tokens

    def of(
        self, rows: Sequence[ScheduledSeq], added: Sequence[Sequence[int]], wanted: Container[int]
    ) -> Iterator[tuple[ScheduledSeq, F32]]:
        """Each row of the step whose sequence is wanted, with the features [tokens, width] of its known tokens and
        right drafts.
        """
        outputs = self._outputs()
        parts = [outputs[name] for name in self._names]
        for number, (row, tokens) in enumerate(zip(rows, added, strict=True)):
            if row.seq_id not in wanted:
                continue
            at = self._right_tokens(number, row, tokens)
            whole = at[-1] - at[0] + 1 == len(at)
            own = [part[at[0] : at[-1] + 1] if whole else part[at] for part in parts]
            yield row, own[0] if len(own) == 1 else np.concatenate(own, axis=1)
