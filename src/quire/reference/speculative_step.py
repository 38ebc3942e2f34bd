"""One round of speculative decoding by rejection (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Chances = npt.NDArray[np.float64]


def accept(
    drafts: Sequence[int], drafted: Sequence[Chances], target: Sequence[Chances], chance: np.random.Generator
) -> list[int]:
    """The tokens that a round gives: accepted drafts, and one of the target's own behind them.

    `drafted[i]` is the distribution that draft i was drawn from, `target[i]` the target's at that position, with one
    more for the token behind the last draft. A rejected draft is replaced by one of the residual max(0, p − q), which
    subtracts the draft's whole distribution: with only the draft's own probability subtracted from every token, as
    some listings have it, the result is not distributed as p.
    """
    taken: list[int] = []
    for draft, q, p in zip(drafts, drafted, target, strict=False):
        if chance.random() * q[draft] >= p[draft]:
            residual = np.maximum(p - q, 0)
            return [*taken, int(chance.choice(len(p), p=residual / residual.sum()))]
        taken.append(draft)
    last = target[len(drafts)]
    return [*taken, int(chance.choice(len(last), p=last))]
