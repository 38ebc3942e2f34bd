"""Which experts change places, so that ranks that hold whole ones have about equal work.

As EPLB of DeepSeek-V3 (github.com/deepseek-ai/EPLB): places beyond the experts have copies of the busiest ones, and all
are spread so that ranks have equal loads. Every rank keeps as many places as it had. Loads are pairs of (token,
expert), older ones counting less. One expert is copied, or two change, at a time, between steps, in a small share of
their time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np

from quire.executor.base import I64, ExpertLoads
from quire.program.ranks import even_share

LOOK_STEPS = 256  # steps between two looks at the loads
_KEPT = 0.5  # of the older loads at a look
_ENOUGH = 16  # pairs for each expert: fewer say little
_SHARE = 0.02  # of the time of steps, for experts that change places
_LONG = 0.1  # seconds that count of a step: the engine may have been idle before it
_GAIN = 0.02  # of the mean load of ranks: less is not worth an exchange
# Looks after an exchange that count nothing of its layer: pairs are counted by place, so some are of the experts that
# were there before. Replicas add theirs when they look themselves, up to a look later.
_MIXED = 2


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


def copies(pairs: I64, placed: Sequence[int], ranks: int) -> Iterator[tuple[int, int]]:
    """Places from which experts should be copied and those where to, one after the other, for `pairs` by place.

    The expert that is busiest at each of its places gets one more, of the expert that can spare one best, until that
    is not much better. It is one on a rank with the fewest copies of it.
    """
    at = np.array(placed)
    loads, count = np.bincount(at, weights=pairs), np.bincount(at)
    owner = np.repeat(range(ranks), [even_share(len(at), ranks, rank).count for rank in range(ranks)])
    while True:
        busy = int((loads / count).argmax())
        left = np.where(count > 1, loads / np.maximum(count - 1, 1), np.inf)  # at each place with one less
        left[busy] = np.inf
        idle = int(left.argmin())
        if not loads[busy] / count[busy] - left[idle] >= max(1.0, _GAIN * loads.mean()):
            return
        held = np.bincount(owner[at == busy], minlength=ranks)
        to = min(np.flatnonzero(at == idle).tolist(), key=lambda place: held[owner[place]])
        yield int(np.flatnonzero(at == busy)[0]), to
        at[to] = busy
        count[busy], count[idle] = count[busy] + 1, count[idle] - 1


def divided(pairs: I64, before: Sequence[int], after: Sequence[int]) -> I64:
    """Pairs by place once these experts are there: those of an expert are divided among its places."""
    found: I64 = (_by_expert(pairs, before) // np.bincount(after))[[*after]]
    return found


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
        self.moved = 0  # exchanges, and copies that were made
        self.ratios: dict[str, float] = {}  # of the busiest expert, and of the busiest rank, to their mean
        self._mixed = dict.fromkeys(self._loads, 0)  # looks to come that count nothing of a layer
        self._steps = 0
        self._unseen: deque[int] = deque()  # layers whose loads are new
        self._due: deque[tuple[Literal["swap", "copy"], int, int, int]] = deque()
        self._began, self._credit, self._cost = time.monotonic(), 0.0, 0.0

    def step(self) -> None:
        """Look at the loads now and then, and let two experts change, or copy one, if that is due."""
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
            if self._credit >= self._cost and self._executor.experts.move:
                self._move(*self._due.popleft())
                self._cost = time.monotonic() - now
                self._credit = 0.0
        self._began = now

    def look(self) -> None:
        """Take what was counted. Which experts change is decided in the steps that follow, layer by layer."""
        for layer, pairs in self._executor.experts.take_pairs().items():
            self.pairs = [sum(both) for both in zip(self.pairs, rank_loads(pairs, self.ranks), strict=True)]
            if self._mixed[layer]:
                self._mixed[layer] -= 1
            else:
                self._loads[layer] = (self._loads[layer] * _KEPT).astype(np.int64) + pairs
        self.ratios = self._ratios()
        if self._executor.experts.move:
            self._due.clear()
            self._unseen = deque(self._loads)

    def _choose(self, layer: int) -> None:
        pairs, placed = self._loads[layer], [*self._executor.experts.placed[layer]]
        if pairs.sum() < _ENOUGH * len(pairs):
            return
        for one, other in copies(pairs, placed, self.ranks):
            self._due.append(("copy", layer, one, other))
            placed[other] = placed[one]
        if self._due:
            pairs = divided(pairs, self._executor.experts.placed[layer], placed)
        self._due.extend(("swap", layer, *places) for places in exchanges(pairs, self.ranks))

    def _move(self, how: Literal["swap", "copy"], layer: int, one: int, other: int) -> None:
        experts = self._executor.experts
        before = [*experts.placed[layer]]
        (experts.swap if how == "swap" else experts.copy)(layer, one, other)
        self._loads[layer] = divided(self._loads[layer], before, experts.placed[layer])
        self._mixed[layer] = _MIXED
        self.moved += 1

    def _ratios(self) -> dict[str, float]:
        busy = [pairs for pairs in self._loads.values() if pairs.any()]
        if not busy:
            return {}
        placed = self._executor.experts.placed
        found = {
            "expert": _ratio(
                [_by_expert(pairs, placed[layer]) for layer, pairs in self._loads.items() if pairs.any()]
            )
        }
        return (
            found | {"rank": _ratio([rank_loads(pairs, self.ranks) for pairs in busy])}
            if self.ranks > 1
            else found
        )


def _by_expert(pairs: I64, placed: Sequence[int]) -> I64:
    found: I64 = np.bincount(placed, weights=pairs).astype(np.int64)
    return found


def _ratio(loads: Sequence[Sequence[int] | I64]) -> float:
    return float(np.mean([max(each) * len(each) / sum(each) for each in loads]))
