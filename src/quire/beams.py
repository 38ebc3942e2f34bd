"""What a request asks of a beam search."""

from __future__ import annotations

from typing import Literal

from quire import records


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """A beam search: `width` sequences go on at once.

    The score of a finished sequence is the sum of its log-probabilities divided by length ** `length_penalty`, where
    the length counts generated tokens. `early_stopping` is when the search ends before the largest length, once
    `width` sequences have finished: at once (True), when the best running one has no better score than the worst
    finished one (False), or when it could get none at any length ("never"). As transformers' generation config.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
