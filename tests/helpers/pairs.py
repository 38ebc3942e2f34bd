"""A product of test parameters, most of it behind the marker `long`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Every combination as a parameter set. Those outside a sample in which any two values of different axes meet are
    marked `long`."""
    every = list(itertools.product(*(range(len(axis)) for axis in axes)))
    left = {pair for combination in every for pair in _pairs(combination)}
    sample = set()
    while left:
        best = max(every, key=lambda combination: len(left.intersection(_pairs(combination))))
        sample.add(best)
        left.difference_update(_pairs(best))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, combination, strict=True)),
            id="-".join(str(axis[i]) for axis, i in zip(axes, combination, strict=True)),
            marks=() if combination in sample else pytest.mark.long,
        )
        for combination in every
    ]


def _pairs(combination: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(itertools.combinations(enumerate(combination), 2))
