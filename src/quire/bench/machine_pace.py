"""How fast the machine was, by time: what all steps of a moment have in common, whatever is in them.

Steps with many rows run when requests have queued up, and requests queue up when the machine is slow. A model that does
not know of the machine takes that for a price of rows, so that a simulated queue would keep itself. So what slows all
steps of a moment is told apart from what a kind of step takes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.records import dataclass

_SECONDS, _STEPS = 0.25, 16  # of a moment, at least
_OTHERS = 4  # steps of other kinds that tell the pace of a moment
_PRIOR = 0.25  # (logarithms, squared) of moments without which all kinds have the same pace
_PARTS = 12  # of a log: how fast the machine was in them is how fast it may be

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MachinePace:
    """Moments that have `begun`, in order, with the factor of the time that steps took in each."""

    begun: Sequence[float]
    factors: Sequence[float]

    def at(self, time: float) -> float:
        """The factor of a moment; that of the first before it, and of the last after it."""
        return self.factors[max(0, bisect_right(self.begun, time) - 1)] if self.factors else 1.0


def moments_of(begun: Floats) -> NDArray[np.int64]:
    """The moment of each step, by number: as long as it takes to tell how fast the machine is."""
    found = np.zeros(len(begun), np.int64)
    number, first, count = 0, begun[0] if len(begun) else 0.0, 0
    for i, at in enumerate(begun.tolist()):
        if at - first >= _SECONDS and count >= _STEPS:
            number, first, count = number + 1, at, 0
        found[i], count = number, count + 1
    if count < _STEPS and number:
        found[found == number] = number - 1
    return found


def _cuts(moments: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where a moment ends and the next one begins, by the number of the step."""
    return np.flatnonzero(np.diff(moments)) + 1


def pace_of(moments: NDArray[np.int64], ratios: Floats) -> Floats:
    """By moment, what its steps took relative to what they would take, in the median; the median of moments is 1."""
    if not len(ratios):
        return np.ones(0)
    found = np.array([np.median(part) for part in np.split(ratios, _cuts(moments))])
    middle = np.median(found)
    return found / middle if middle > 0 else np.ones(len(found))


def pace_shares(
    moments: NDArray[np.int64], kinds: NDArray[np.int64], slowness: Floats, prompts: Sequence[bool]
) -> tuple[float, float]:
    """How much of the pace of a moment, as other kinds have it, a kind has too: exponents from 0 to 1, of steps without
    and with tokens of prompts. `slowness` is what each step took relative to the usual time of its kind; `prompts`
    tells by number whether a kind has such tokens.

    Slopes of logarithms, within each kind: a kind that only ran in slow moments may be slow in itself.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    cuts = _cuts(moments)
    for ran, logs in zip(np.split(kinds, cuts), np.split(np.log(slowness), cuts), strict=True):
        for kind in np.unique(ran).tolist():
            others = logs[ran != kind]
            if len(others) >= _OTHERS:
                points.setdefault(kind, []).append((np.median(others), np.median(logs[ran == kind])))
    sums = np.full((2, 2), _PRIOR)
    for kind, found in points.items():
        of_others, own = np.array(found).T
        apart = of_others - of_others.mean()
        sums[int(prompts[kind])] += apart @ own, apart @ apart
    of_decodes, of_prompts = np.clip(sums[:, 0] / sums[:, 1], 0.0, 1.0).tolist()
    return of_decodes, of_prompts


def paced(begun: Floats, moments: NDArray[np.int64], factors: Floats) -> MachinePace:
    """The paces of moments."""
    _, firsts = np.unique(moments, return_index=True)
    return MachinePace(array("d", begun[firsts].tolist()), array("d", factors.tolist()))


def levels_of(begun: Floats, slowness: Floats, seconds: Floats) -> tuple[float, float]:
    """How fast and how slow the machine was in parts of a log, relative to all of it: what steps took in them together,
    beside what they would have taken at the usual pace. Without enough steps 1 and 1."""
    if len(begun) < _PARTS * _STEPS:
        return 1.0, 1.0
    place = np.minimum((begun - begun[0]) / max(1e-9, begun[-1] - begun[0]) * _PARTS, _PARTS - 1).astype(
        np.int64
    )
    took = np.bincount(place, seconds, _PARTS)
    plain = np.bincount(place, seconds / slowness, _PARTS)
    whole = took.sum() / plain.sum()
    parts = took[plain > 0] / plain[plain > 0] / whole
    return float(parts.min()), float(parts.max())
