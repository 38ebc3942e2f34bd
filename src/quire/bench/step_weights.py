"""Seconds by core.cost_model.FEATURES, fitted to steps that have all run.

The engine's StepCostModel learns while it serves: what it has at the end of a log is the machine of the last second.
Here all steps count, each divided by how slow the machine was when it ran. Like there, errors are relative, weights are
never negative, and steps that are far off count less (Huber).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 5  # of weighing steps anew
_SWEEPS = 60
_PRIOR = 24.0  # steps that outweigh what was known before
_NEAR = 1e-3  # of what was found in the round before
_PROMPT = (2, 4)  # features of prompts
_FEW, _SAYS = 8, 128  # tokens of prompts in a step that say what longer ones take
_LONG = (512.0, 512.0 * 256)  # those of a prompt that takes what was known before, until there is a long one

Floats = NDArray[np.float64]


def fitted_weights(features: Floats, seconds: Floats, before: Sequence[float]) -> Floats:
    """The weights for steps as rows of `features`; `before` are those for what no step tells."""
    known = np.asarray(before, np.float64)
    if not len(seconds):
        return known
    scale = np.maximum(features.max(axis=0), 1.0)
    rows, first = features / scale / seconds[:, None], known * scale
    matrix, right = _long_prompts(features, known, scale)
    found, keep = first.copy(), _PRIOR / len(seconds) ** 2
    keep = keep if keep > _NEAR else 0.0  # what was known may be wrong by any factor
    weight = np.ones(len(seconds))
    for turn in range(_ROUNDS):
        if turn:
            off = np.abs(products(rows, found) - 1)
            weight = np.minimum(1.0, 3 * np.median(off) / np.maximum(off, 1e-12))
        weighed = rows * weight[:, None]
        found = _descended(
            matrix + np.einsum("ni,nj->ij", weighed, rows), right + weighed.sum(axis=0), first, found, keep
        )
    made: Floats = found / scale
    return made


def products(rows: Floats, weights: Floats) -> Floats:
    """Of each row with the weights. Not by BLAS, whose buffers are more than a simulation beside a server may have."""
    made: Floats = np.einsum("ni,i->n", rows, weights)
    return made


def _long_prompts(features: Floats, known: Floats, scale: Floats) -> tuple[Floats, Floats]:
    """Equations of a few long prompts that took what was known before, until one has been seen: else what is beside the
    tokens of prompts of two would be theirs, and a hundred times as much in longer ones."""
    count = len(scale)
    row, places = np.zeros(count), list(_PROMPT)
    row[places] = _LONG
    taken = float((known * row).sum())
    if taken <= 0 or features[:, 2].max() >= _SAYS:
        return np.zeros((count, count)), np.zeros(count)
    row = row / scale / taken
    return _FEW * np.outer(row, row), _FEW * row


def _descended(matrix: Floats, right: Floats, first: Floats, found: Floats, keep: float) -> Floats:
    """Coordinate descent to the least squares that are not negative, drawn to `first`, and a little to what was found
    in the round before: what steps do not tell apart shall not jump."""
    before, found = found, found.copy()
    for _ in range(_SWEEPS):
        for i in np.flatnonzero(matrix.diagonal()):
            own = matrix[i, i]
            rest = right[i] - (matrix[i] * found).sum() + own * found[i]
            drawn = keep * first[i] + _NEAR * before[i]
            found[i] = max(0.0, (rest + own * drawn) / (own * (1 + keep + _NEAR)))
    return found
