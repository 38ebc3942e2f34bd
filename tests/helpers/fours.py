"""Weights in the pattern 2:4."""

from __future__ import annotations

import numpy as np

from quire.executor.base import F32


def drop_two(weight: F32, seed: int) -> None:
    """Make two of each four inputs of an output zero, another two each time; of some fours three or all.

    Inputs that are no whole four stay.
    """
    random = np.random.default_rng([seed, 24])
    whole = weight.shape[1] // 4 * 4
    fours = weight[:, :whole].reshape(len(weight), -1, 4).copy()
    gone = random.random(fours.shape).argsort(2) < 2
    gone |= random.random(fours.shape) < 0.05
    fours[gone] = 0
    weight[:, :whole] = fours.reshape(len(weight), whole)
