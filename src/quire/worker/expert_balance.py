"""Which experts change places, so that ranks that hold whole ones have about equal work.

As EPLB of DeepSeek-V3 (github.com/deepseek-ai/EPLB), without copies of experts: every rank keeps as many experts as it
had, so no weights are added to the plan of memory. Loads are pairs of (token, expert), older ones counting less. Two
experts change at a time, between steps, in a small share of their time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from quire.executor.base import I64, ExpertLoads
from quire.program.ranks import even_share

LOOK_STEPS = 256  # steps between two looks at the loads
_KEPT = 0.5  # of the older loads at a look
_ENOUGH = 16  # pairs for each expert: fewer say little
_SHARE = 0.02  # of the time of steps, for experts that change places
_LONG = 0.1  # seconds that count of a step: the engine may have been idle before it
_GAIN = 0.02  # of the mean load of ranks: less is not worth an exchange


def rank_loads(pairs: Sequence[int] | I64, ranks: int) -> list[int]:
    """Pairs of each rank, of those of each place."""
    starts = [even_share(len(pairs), ranks, rank).start for rank in range(ranks)]
    found: list[int] = np.add.reduceat(np.asarray(pairs), starts).tolist()
    return found


def exchanges(pairs: I64, ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs of places whose experts should change, one after the other, for `pairs` by place.

    Each takes as much as one exchange can from the busiest rank; they end where that is little.
    """
    pairs = pairs.copy()
    shares = [even_share(len(pairs), ranks, rank) for rank in range(ranks)]
    while True:
        loads = np.array(rank_loads(pairs, ranks))
        high, low = int(loads.argmax()), int(loads.argmin())
        ours, theirs = (slice(shares[rank].start, shares[rank].stop) for rank in (high, low))
        passed = pairs[ours, None] - pairs[None, theirs]
        after = np.maximum(loads[high] - passed, loads[low] + passed)  # the busier of the two
        best = int(after.argmin())
        if loads[high] - after.flat[best] < max(1.0, _GAIN * loads.mean()):
            return
        one, other = np.unravel_index(best, after.shape)
        found = int(one) + ours.start, int(other) + theirs.start
        pairs[[*found]] = pairs[[*found[::-1]]]
        yield found


class HasExperts(Protocol):
    """An executor."""

    @property
    def experts(self) -> ExpertLoads:
        """See Runnable.experts."""


class ExpertBalance:
    """Counts the pairs of a model's experts, and moves experts between ranks; `step` is called before each step."""

    def __init__(self, executor: HasExperts) -> None:
        self._executor, self.ranks = executor, executor.experts.ranks
        self._loads: dict[int, I64] = {
            layer: np.zeros_like(pairs) for layer, pairs in executor.experts.take_pairs().items()
        }
        self.pairs = [0] * self.ranks  # of each rank, so far
        self.moved = 0  # exchanges
        self.ratios: dict[str, float] = {}  # of the busiest expert, and of the busiest rank, to their mean
        self._steps = 0
        self._unseen: deque[int] = deque()  # layers whose loads are new
        self._due: deque[tuple[int, int, int]] = deque()
        self._began, self._credit, self._cost = time.monotonic(), 0.0, 0.0

    def step(self) -> None:
        """Look at the loads now and then, and let two experts change if that is due."""
        if not self._loads:
            return
        self._steps += 1
        if self._steps % LOOK_STEPS == 0:
            self.look()
        elif self._unseen and not self._due:
            self._choose(self._unseen.popleft())
        now = time.monotonic()
        if self._due:
            self._credit += _SHARE * min(now - self._began, _LONG)
            if self._credit >= self._cost:
                self._exchange(*self._due.popleft())
                self._cost = time.monotonic() - now
                self._credit = 0.0
        self._began = now

    def look(self) -> None:
        """Take what was counted. Which experts change is decided in the steps that follow, layer by layer."""
        for layer, pairs in self._executor.experts.take_pairs().items():
            self.pairs = [sum(both) for both in zip(self.pairs, rank_loads(pairs, self.ranks), strict=True)]
            self._loads[layer] = (self._loads[layer] * _KEPT).astype(np.int64) + pairs
        self.ratios = self._ratios()
        if self._executor.experts.move:
            self._due.clear()
            self._unseen = deque(self._loads)

    def _choose(self, layer: int) -> None:
        pairs = self._loads[layer]
        if pairs.sum() >= _ENOUGH * len(pairs):
            self._due.extend((layer, *places) for places in exchanges(pairs, self.ranks))

    def _exchange(self, layer: int, one: int, other: int) -> None:
        self._executor.experts.swap(layer, one, other)
        pairs = self._loads[layer]
        pairs[[one, other]] = pairs[[other, one]]
        self.moved += 1

    def _ratios(self) -> dict[str, float]:
        busy = [pairs for pairs in self._loads.values() if pairs.any()]
        if not busy:
            return {}
        found = {"expert": _ratio(busy)}
        return (
            found | {"rank": _ratio([rank_loads(pairs, self.ranks) for pairs in busy])}
            if self.ranks > 1
            else found
        )


def _ratio(loads: Sequence[Sequence[int] | I64]) -> float:
    return float(np.mean([max(each) * len(each) / sum(each) for each in loads]))
