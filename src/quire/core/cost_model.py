"""What a step will take: seconds as a sum of what is in it, fitted to the steps that run.

    seconds ≈ d0 · (w0 + w1 · decode rows + w3 · keys that decode rows read + w5 · adapter rows + w6 · grammar rows
                    + w7 · drafts) + d1 · (w2 · prompt tokens + w4 · prompt tokens × keys before them)

Weights are never negative. The fit minimizes relative errors, so short steps count as much as long ones, with Huber's
weights, as other work on the machine makes some steps far too slow. Steps of different kinds (with prompts, adapters,
grammars or drafts) have normal equations of their own, each with the memory of its latest steps: hours of decoding
do not wash out what is known of prompts. The drifts d0 and d1 follow the machine at once: moving ratios of real to
fitted time. Prompts have their own, as what makes steps of streams slower (other work, rows that do not add up) hardly
changes what a token of a prompt takes.

No sum says what short prompts take: reading the weights bounds steps of few tokens, computing those of many, and
kernels have steps of their own between. So steps with prompts are bent by a factor, learned by the number of their
tokens and of the streams beside them.

A step costs a few microseconds: one row of the normal equations, and now and then a few sweeps of coordinate descent.
`speculate.step_costs` learns something else: the kinks of the curve between 1 and some 30 tokens, relative to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import mul
from typing import Any

FEATURES = (
    "step", "decode_rows", "prompt_tokens", "decode_context", "prompt_work", "adapter_rows", "grammar_rows", "drafts",
)  # fmt: skip
# Magnitudes, so that the equations are well scaled.
_SCALE = (1.0, 16.0, 256.0, 16384.0, 2.0**20, 16.0, 16.0, 16.0)
# Before any step has run: the relations of a small model on two cores.
_FIRST = (0.01, 1e-3, 5e-4, 5e-8, 1e-8, 5e-4, 1e-4, 5e-4)
_COUNT = len(FEATURES)
_MEMORY = 512.0  # steps of a kind that count
_PRIOR = 24.0  # steps that outweigh what was known before
_SOLVE = 16  # steps between two solutions
_SWEEPS = 4
_DRIFT = (0.05, 0.1)  # of the latest step in the drift
_PROMPT = frozenset((2, 4))  # features of prompts
_FEW, _SAYS = 8, 128  # tokens of prompts in a step that say what longer ones take
_LONG = {2: 512 / _SCALE[2], 4: 512 * 256 / _SCALE[4]}
_MOST_DRIFT = 1.5  # natural logarithm
_YOUNG = 48  # steps with prompts before bends are learned
_BEND = 0.1  # of the latest step in a bend
_MOST_BEND = 0.3  # natural logarithm: what one step may say
BEND_ROWS, BEND_SIZES = 5, 14  # 0, 1, 2 to 3, 4 to 7 and more streams; 1, 2, 4 … 8192 tokens of prompts
_VERSION = 3

StepFeatures = tuple[float, ...]


class _Kind:
    """Normal equations of steps of one kind. New steps weigh more and more, in place of old ones less and less."""

    __slots__ = ("matrix", "right", "steps", "weight")

    def __init__(self) -> None:
        self.matrix = [[0.0] * _COUNT for _ in range(_COUNT)]
        self.right = [0.0] * _COUNT
        self.weight = 1.0  # of the next step
        self.steps = 0.0

    def add(self, row: Sequence[float], places: Sequence[int], target: float, weight: float) -> None:
        weight *= self.weight
        for i in places:
            into, value = self.matrix[i], weight * row[i]
            for j in places:
                into[j] += value * row[j]
            self.right[i] += value * target
        self.steps = min(self.steps + 1, _MEMORY)
        self.weight *= 1 + 1 / _MEMORY
        if self.weight > 1e12:
            self._shrink()

    def _shrink(self) -> None:
        self.matrix = [[value / self.weight for value in row] for row in self.matrix]
        self.right = [value / self.weight for value in self.right]
        self.weight = 1.0


def bend_of(bends: Sequence[float], rows: float, tokens: float) -> float:
    """The factor of a step with so many streams and tokens of prompts. `bends`: a StepCostModel's, or none."""
    if tokens < 1 or not bends:
        return 1.0
    low, part = _size(tokens)
    first = _rows(rows) * BEND_SIZES + low
    return math.exp(bends[first] * (1 - part) + bends[first + 1] * part)


def worst_margin(spread: float, bends: Sequence[float]) -> float:
    """By how much a step may take longer than the sum of its features, as a share."""
    return (1 + spread) * math.exp(max(bends, default=0.0)) - 1


def _rows(rows: float) -> int:
    return min(BEND_ROWS - 1, int(rows).bit_length())


def _size(tokens: float) -> tuple[int, float]:
    """The power of two below, and how far it is to the next one."""
    at = math.log2(tokens)
    low = min(int(at), BEND_SIZES - 2)
    return low, min(1.0, at - low)


class StepCostModel:
    """Seconds of steps, by features in the order of FEATURES."""

    def __init__(self, weights: Sequence[float] = _FIRST) -> None:
        self._first = tuple(weights)
        self._weights = [weight * scale for weight, scale in zip(weights, _SCALE, strict=True)]
        # A prompt of 512 tokens, and what it takes before one has been seen.
        taken = self._weights[2] * _LONG[2] + self._weights[4] * _LONG[4]
        self._long = {i: x / taken for i, x in _LONG.items()} if taken else {}
        self._kinds: dict[int, _Kind] = {}
        self._drift = [0.0, 0.0]  # natural logarithms: of all but prompts, and of prompts
        self._bends = [0.0] * (BEND_ROWS * BEND_SIZES)  # natural logarithms
        self._told = [0.0] * len(self._bends)  # steps by which each was learned
        self._prompts = 0  # steps with prompts
        self._longest = 0.0  # tokens of prompts in a step
        self._middle = 0.1  # running median of relative errors
        self._usual = [0.1, 0.1]  # the same of steps without prompts, and with
        self._tail = 0.3  # running 90th percentile
        self.steps = 0

    @property
    def weights(self) -> tuple[float, ...]:
        """Seconds per unit of each feature, with the drift."""
        drifts = self._drifts()
        return tuple(
            drift * weight / scale for drift, weight, scale in zip(drifts, self._weights, _SCALE, strict=True)
        )

    @property
    def bends(self) -> tuple[float, ...]:
        """What `bend_of` reads; none before steps with prompts have been seen."""
        return tuple(self._bends) if any(self._told) or any(self._bends) else ()

    def _drifts(self) -> Sequence[float]:
        """The factor of each feature."""
        plain, prompt = math.exp(self._drift[0]), math.exp(self._drift[1])
        return (plain, plain, prompt, plain, prompt, plain, plain, plain)

    @property
    def error(self) -> float:
        """Median of |real / predicted - 1| of recent steps, each predicted before it was learned from."""
        return self._middle

    @property
    def spread(self) -> float:
        """Nine of ten steps are within this share of their prediction."""
        return self._tail

    def seconds(self, features: Sequence[float]) -> float:
        """The prediction for a step. Without steps so far it is a guess."""
        parts = zip(self._drifts(), self._weights, _SCALE, features, strict=True)
        bend = bend_of(self._bends, features[1], features[2])
        return bend * sum([drift * weight / scale * x for drift, weight, scale, x in parts if x])

    def formula(self) -> Callable[[Sequence[float]], float]:
        """`seconds` as the model is now, for many steps: what it learns later changes nothing."""
        weights, bends = self.weights, self.bends

        def seconds(features: Sequence[float]) -> float:
            plain = float(sum(map(mul, weights, features)))
            return plain * bend_of(bends, features[1], features[2]) if features[2] else plain

        return seconds

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Take in a step. A step without positive time is ignored."""
        if not 0 < seconds < math.inf:
            return
        places = [i for i in range(_COUNT) if features[i]]
        row = [x / scale for x, scale in zip(features, _SCALE, strict=True)]
        drifts = self._drifts()
        parts = [drifts[i] * self._weights[i] * row[i] for i in places]
        fitted = sum(parts)
        prompt = sum([part for i, part in zip(places, parts, strict=True) if i in _PROMPT])
        ratio = seconds / fitted if fitted > 0 else 1.0
        bend = bend_of(self._bends, features[1], features[2])
        error = abs(ratio / bend - 1)
        self.steps += 1
        if self.steps > 1:  # the first one reads the weights of the model from memory that is not mapped yet
            self._count(error)
            usual = self._usual[prompt > 0] = _followed(self._usual[prompt > 0], error)
            trust = min(1.0, 3 * usual / error) if error else 1.0
            kind = sum([1 << i for i in (2, 5, 6, 7) if features[i]])
            equations = self._kinds.get(kind) or self._kinds.setdefault(kind, _Kind())
            equations.add([x / seconds for x in row], places, 1.0, trust)
            if features[2]:
                self._prompts += 1
                self._longest = max(self._longest, features[2])
                if self._prompts > _YOUNG:  # before, it may be the sum that is wrong
                    self._bend(features[1], features[2], math.log(ratio / bend))
            which = int(prompt > fitted / 2)
            if which or not prompt:  # where both are in a step, the larger part tells
                change = self._drift[which] + _DRIFT[which] * trust * max(-1.0, min(1.0, math.log(ratio)))
                self._drift[which] = max(-_MOST_DRIFT, min(_MOST_DRIFT, change))
            if self.steps % _SOLVE == 0 or self.steps < _SOLVE:
                self._solve()

    def _bend(self, rows: float, tokens: float, error: float) -> None:
        """Learn from a step with prompts. Beside how many streams none was seen, others tell."""
        error = max(-_MOST_BEND, min(_MOST_BEND, error))
        mine, (low, part) = _rows(rows), _size(tokens)
        for size, weight in ((low, 1 - part), (low + 1, part)):
            at = mine * BEND_SIZES + size
            told = self._told[at] = min(self._told[at] + weight, 1 / _BEND)
            self._bends[at] += error * weight / max(1.0, told)
            for other in range(size, len(self._bends), BEND_SIZES):
                if not self._told[other]:
                    self._bends[other] = self._bends[at]

    def prompt_seconds(self, tokens: int) -> float:
        """To compute a prompt alone, in steps of 512 tokens."""
        each, work = self.weights, tokens * tokens / 2
        return each[0] * -(-tokens // 512) + each[2] * tokens + each[4] * work

    def token_seconds(self) -> float:
        """To decode one token of one sequence that has no neighbours."""
        each = self.weights
        return each[0] + each[1]

    def dump(self) -> dict[str, Any]:
        """What `load` reads: plain numbers. What hardly a step had is as it was: with the drift of each run it would be
        hundreds of times as much after some dozens of runs."""
        kinds = self._kinds.values()
        seen = [sum(kind.steps for kind in kinds if kind.matrix[i][i]) >= _SOLVE for i in range(_COUNT)]
        return {
            "version": _VERSION,
            "features": list(FEATURES),
            "seconds": [
                now if told else was for now, was, told in zip(self.weights, self._first, seen, strict=True)
            ],
            "bends": list(self._bends),
            "error": self.error,
            "spread": self.spread,
            "steps": self.steps,
        }

    @classmethod
    def load(cls, stored: Mapping[str, Any]) -> StepCostModel:
        """A model that begins with the weights of another. Raises ValueError for anything but what `dump` returns."""
        if stored.get("version") != _VERSION or stored.get("features") != list(FEATURES):
            raise ValueError("a cost model of another version")
        weights = stored.get("seconds")
        if not isinstance(weights, list) or len(weights) != _COUNT:
            raise ValueError("a cost model without its weights")
        if not all(type(weight) is float and 0 <= weight < 1e6 for weight in weights) or not sum(weights):
            raise ValueError("a cost model with weights that are no seconds")
        bends = stored.get("bends")
        if not isinstance(bends, list) or len(bends) != BEND_ROWS * BEND_SIZES:
            raise ValueError("a cost model without its bends")
        if not all(type(bend) is float and abs(bend) < _MOST_DRIFT for bend in bends):
            raise ValueError("a cost model with bends that are no factors")
        model = cls(weights)
        model._bends = list(bends)
        return model

    def _count(self, error: float) -> None:
        """Follow the quantiles of errors by steps up and down (Robbins and Monro)."""
        self._middle = _followed(self._middle, error)
        self._tail = max(self._middle, self._tail * (1.09 if error > self._tail else 1 / 1.0096))

    def _solve(self) -> None:
        """Coordinate descent from the last solution, never below 0: it is near, so a few sweeps are enough."""
        matrix = [[0.0] * _COUNT for _ in range(_COUNT)]
        right, steps = [0.0] * _COUNT, 0.0
        rights = [0.0] * _COUNT, [0.0] * _COUNT  # of steps without prompts, and with
        for number, kind in self._kinds.items():
            steps += kind.steps
            group = rights[bool(number & 1 << 2)]
            for i in range(_COUNT):
                if kind.matrix[i][i]:
                    right[i] += kind.right[i] / kind.weight
                    group[i] += kind.right[i] / kind.weight
                    into = matrix[i]
                    for j, value in enumerate(kind.matrix[i]):
                        into[j] += value / kind.weight
        # As if a few long prompts had taken what was known before, until there is one: else what is beside the tokens
        # of prompts of two would be theirs, and a hundred times as much in longer ones.
        for i, value in self._long.items() if self._longest < _SAYS else ():
            right[i] += _FEW * value
            for j, other in self._long.items():
                matrix[i][j] += _FEW * value * other
        keep = max(1e-3, _PRIOR / (steps * steps) if steps else 1.0)
        found, before = self._weights, list(self._weights)
        for _ in range(_SWEEPS):
            for i in range(_COUNT):
                row = matrix[i]
                if not row[i]:
                    continue
                rest = right[i] - sum([a * w for a, w in zip(row, found, strict=True)]) + row[i] * found[i]
                found[i] = max(0.0, (rest + keep * row[i] * before[i]) / (row[i] * (1 + keep)))
        for which, group in enumerate(rights):
            self._settle(which, before, group)

    def _settle(self, which: int, before: Sequence[float], right: Sequence[float]) -> None:
        """What the fit has taken over is no drift any more."""
        old = sum([r * w for r, w in zip(right, before, strict=True)])
        new = sum([r * w for r, w in zip(right, self._weights, strict=True)])
        drift = self._drift[which]
        if old > 0 and new > 0 and drift:
            taken = math.copysign(1, drift) * math.log(new / old)
            self._drift[which] = math.copysign(max(0.0, abs(drift) - max(0.0, min(0.2, taken))), drift)


def _followed(median: float, seen: float) -> float:
    """A running median after one more value."""
    return max(0.005, median * (1.03 if seen > median else 1 / 1.03))
