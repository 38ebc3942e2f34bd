"""What a step costs by its tokens, learned from the steps that run."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from math import inf

_FIRST_SLOPE = 0.04  # of the cost of one token, for each more: a guess until it has been seen
# Observations of a size, and of the scale, whose median counts: other work on the machine makes some far too slow.
_KEPT, _RECENT = 9, 15
_REDRAW = 16  # steps
_COLD = 2  # passes whose code and weights are not in memory yet
_FORGET = 2048  # steps after which a size that has not run is guessed again


class StepCosts:
    """Relative costs of steps of 1 to `largest` tokens, without prompts.

    All of them rise together as contexts grow and when other work takes the processors; what counts here is the
    relation between sizes, which changes slowly. A size that has not run is interpolated between those that have; next
    to a settled one it is hoped to go on as before, so that it is tried where that would gain.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._seen: dict[int, deque[float]] = {}
        self._cost: dict[int, float] = {}  # of each size that has run
        self._last: dict[int, int] = {}  # its last step
        self._steps = 0
        self._scale = 1.0  # seconds per unit of cost
        self._scales: deque[float] = deque(maxlen=_RECENT)
        self.curve = [_guess(n) for n in range(largest + 1)]  # by tokens; never falls. Entry 0 is unused.

    @property
    def unit(self) -> float:
        """Seconds per unit of `curve`; 0 while nothing has run."""
        return self._scale if self._last else 0.0

    @property
    def widest(self) -> int:
        """The largest size that has run; 0 while none has."""
        return max(self._last, default=0)

    def seconds(self, tokens: int) -> float:
        """What a step of so many tokens takes; 0 while none has run."""
        return self.unit * self.curve[min(tokens, self._largest)]

    def known(self, tokens: int) -> tuple[int, float]:
        """How often a size has run, up to _KEPT times, and how many steps ago it did."""
        if tokens not in self._last:
            return 0, inf
        return len(self._seen[tokens]), self._steps - self._last[tokens]

    def observe(self, tokens: int, seconds: float) -> bool:
        """Take in a step. Returns whether `curve` has been drawn again."""
        if not 0 < tokens <= self._largest or seconds <= 0:
            return False
        self._steps += 1
        fresh = tokens not in self._last
        if fresh:
            self._seen[tokens] = deque(maxlen=_KEPT)
        if not self._last:
            self._scales.append(seconds)
        elif not fresh:
            self._scales.append(seconds / self._cost[tokens])
        self._scale = median(self._scales)
        seen = self._seen[tokens]
        seen.append(min(seconds / self._scale, self._most(tokens)) if fresh else seconds / self._scale)
        self._cost[tokens] = median(seen)
        self._last[tokens] = self._steps
        if len(seen) > 2 and self._steps % _REDRAW:
            return False
        self.curve = self._drawn()
        return True

    def _most(self, tokens: int) -> float:
        """What so many tokens cost one by one, at the price of the nearest size that has run."""
        if not self._cost:
            return inf
        near = min(self._cost, key=lambda n: abs(n - tokens))
        return self._cost[near] * max(1.0, tokens / near)

    def _drawn(self) -> list[float]:
        for n in [n for n, step in self._last.items() if step <= self._steps - _FORGET]:
            del self._last[n], self._seen[n], self._cost[n]
        known = sorted(self._last)
        cost = dict(zip(known, self._rising(known), strict=True))
        made, highest = [0.0], 0.0
        for n in range(1, self._largest + 1):
            at = bisect_left(known, n)
            if 0 < at < len(known):
                low, high = known[at - 1], known[at]
                value = cost[low] + (cost[high] - cost[low]) * (n - low) / (high - low)
            else:
                near = known[min(at, len(known) - 1)]
                value = cost[near] * _guess(n) / _guess(near)
            if self._is_settled(n - 1) and not self._is_settled(n):
                rise = highest - made[n - 2] if self._is_settled(n - 2) else 0.0
                value = min(value, max(highest + rise, highest * _guess(n) / _guess(n - 1)))
            highest = max(highest, value)
            made.append(highest)
        return made

    def _is_settled(self, tokens: int) -> bool:
        """Whether more is known of a size than one step, which may have been an accident, or loaded code."""
        return tokens in self._last and len(self._seen[tokens]) > 1

    def _rising(self, known: list[int]) -> list[float]:
        """The costs of sizes as the nearest that never fall: those out of order become their mean."""
        pools: list[tuple[float, int, int]] = []  # mean, weight, sizes
        for n in known:
            mean, weight, sizes = self._cost[n], len(self._seen[n]), 1
            while pools and pools[-1][0] >= mean:
                before, more, others = pools.pop()
                mean = (mean * weight + before * more) / (weight + more)
                weight, sizes = weight + more, sizes + others
            pools.append((mean, weight, sizes))
        return [mean for mean, _, sizes in pools for _ in range(sizes)]


def median(values: deque[float]) -> float:
    """The lower one of two."""
    return sorted(values)[(len(values) - 1) // 2]


class PassCosts:
    """What passes of a draft model cost. `relative`: of a step of the target, until passes are measured. `once`: one
    pass makes all drafts of a step, else there is one for each depth."""

    def __init__(self, largest: int, relative: float, *, once: bool = False) -> None:
        self.once = once
        self._costs, self._relative, self._cold = StepCosts(largest), relative, _COLD
        self.seconds = 0.0  # of all passes

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a pass over so many tokens."""
        self.seconds += seconds
        if self._cold:
            self._cold -= 1
        else:
            self._costs.observe(tokens, seconds)

    def of(self, tokens: float, unit: float) -> float:
        """A pass over so many tokens, in units of the target's curve, each of so many seconds (0: not known)."""
        whole = max(1, round(tokens))
        seconds = self._costs.seconds(whole)
        return seconds / unit if seconds and unit else self._relative * _guess(whole)


def _guess(tokens: int) -> float:
    return 1 + _FIRST_SLOPE * (tokens - 1)
