"""How long the steps of a log took: seconds by what is in them, with what that misses.

A step lasts until the next one begins: commands and reports between steps are part of it. It takes a sum over
cost_model.FEATURES and what is the same for any prompt, times a factor of its kind (decode rows, prompt tokens, each by
powers of 2), times the pace of the machine at its moment (bench.machine_pace), times what remains. What remains is kept
by kind, with the time of each step: simulated steps have that of the steps of their kind that ran at the same time, one
after the other.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import mul
from statistics import median

import numpy as np

from quire.bench.machine_pace import Floats, MachinePace, levels_of, moments_of, pace_of, pace_shares, paced
from quire.bench.step_weights import fitted_weights, products
from quire.core.cost_model import FEATURES, StepFeatures
from quire.records import dataclass
from quire.steplog import log_rows as rows
from quire.steplog.log_rows import SAMPLE_BITS, AnyRow

_LEAST = 8  # steps of a kind that has a factor
_BEYOND = 1.1  # of the largest value seen: outside of the region of a fit
_REACH, _REACH_ERROR = 2.0, 0.1  # of the largest value seen, where the log shows that steps are told so far
_REACH_STEPS = 200  # of a log that can show it
_ROWS, _TOKENS = (
    (1, 3),
    (2, 4),
)  # features that grow with the rows that decode, and with the tokens of prompts
_TURNS = 3  # of telling weights, kinds and paces apart
_APART = 0.25  # seconds at most from a simulated step to that whose ratio it has, if there are nearer ones

StepKind = tuple[int, int]
TimedStep = tuple[float, StepFeatures, float]
_RARE = -1  # in place of decode rows: all kinds of which few steps were seen


@dataclass(frozen=True, slots=True)
class StepsOfKind:
    """What the sum misses for steps of a kind: a `factor`, in the median; and when each has `begun`, in order, with its
    `ratios` of the real time to that of sum, factor and pace, and the `paces` themselves."""

    factor: float
    begun: Sequence[float]
    ratios: Sequence[float]
    paces: Sequence[float]


_UNKNOWN = StepsOfKind(1.0, (), (), ())


@dataclass(frozen=True, slots=True)
class StepFit:
    """Seconds of steps by cost_model.FEATURES: `weights` of these and of any prompt, `kinds` and `pace`. `most` is the
    largest value of each feature that was seen, over `steps` steps; `error` the median of |ratio − 1|. `between`:
    seconds from a step's tokens to the next step, which are part of the step, in the median. `levels`: the pace of the
    fastest and of the slowest part of the log, relative to all of it. `rare`: kinds of which few steps were seen.
    `reach_errors`: of steps with up to twice the rows, or tokens of prompts, that a fit has seen, in the median: the
    larger steps of this log, told by the smaller ones. `shares` of the pace: see machine_pace.pace_shares.
    """

    weights: Sequence[float]
    kinds: dict[StepKind, StepsOfKind]
    pace: MachinePace
    most: tuple[float, ...]
    steps: int
    error: float
    between: float
    levels: tuple[float, float] = (1.0, 1.0)
    rare: frozenset[StepKind] = frozenset()
    reach_errors: tuple[float, float] = (math.inf, math.inf)
    shares: tuple[float, float] = (1.0, 1.0)

    def seconds(self, features: Sequence[float]) -> float:
        """The time of a step at the usual pace."""
        return self.formula()(features)

    def formula(self) -> Callable[[Sequence[float]], float]:
        """`seconds`, for many steps."""
        weights, kinds, found = tuple(self.weights), self.kinds, self._nearest()
        prompts = sum(weights[len(FEATURES) :])

        def seconds(features: Sequence[float]) -> float:
            plain = float(sum(map(mul, weights, features))) + (prompts if features[2] else 0.0)
            return plain * kinds.get(found(_kind(features)), _UNKNOWN).factor

        return seconds

    def _nearest(self) -> Callable[[StepKind], StepKind]:
        """Finds what stands for a kind of steps: itself, or the one of which many were seen that has about as many rows
        and tokens. Rare ones stand for kinds of which a few were seen, and if there are no others."""
        kinds, rare = self.kinds, self.rare
        usual = [kind for kind in kinds if kind[0] != _RARE]

        @cache
        def nearest(kind: StepKind) -> StepKind:
            if kind in kinds:
                return kind
            alike = [one for one in usual if bool(one[1]) == bool(kind[1])]
            if kind in rare or not alike:
                return _RARE, int(kind[1] > 0)
            return min(alike, key=lambda one: abs(one[0] - kind[0]) + 2 * abs(one[1] - kind[1]))

        return nearest

    def walk(self, seed: int) -> Callable[[Sequence[float], float], float]:
        """Draws by what a step at some time differs from its formula: as the steps of the same kind that ran then in
        the log, in their order, with seed 0. Others have the machine of another time, by chance. Steps are not drawn by
        their time alone: short ones would then come again and again where a long one ran. Where none of the kind ran
        then, those of other times come one after the other, at the pace of this one as far as their kind has it."""
        kinds, pace, cursors, found = self.kinds, self.pace, dict[StepKind, int](), self._nearest()
        first = min(one.begun[0] for one in kinds.values())
        span = max(one.begun[-1] for one in kinds.values()) - first
        shift = random.Random(seed).random() * span if seed else 0.0

        def draw(features: Sequence[float], now: float) -> float:
            kind = found(_kind(features))
            own = kinds.get(kind)
            at = first + (now + shift - first) % span if span else first
            if own is None:
                return pace.at(at)
            begun, place = own.begun, cursors.get(kind, 0) % len(own.begun)
            near = abs(begun[place] - at) <= _APART
            if not near:
                there = bisect_left(begun, at)
                near = there < len(begun) and begun[there] - at <= _APART
                place = there if near else place
            cursors[kind] = place + 1
            if near:
                return own.ratios[place] * own.paces[place]
            share = self.shares[kind[1] > 0]
            return own.ratios[place] * math.pow(own.paces[place], 1 - share) * math.pow(pace.at(at), share)

        return draw

    def outside(self, features: Sequence[float]) -> bool:
        """Whether a step has more of something than any step that was seen."""
        return any(value > _BEYOND * most for value, most in zip(features, self.most, strict=True))

    def reach(self) -> tuple[float, ...]:
        """The largest value of each feature up to which the fit may be trusted: twice what was seen, where the log
        shows that this can be told."""
        found = [_BEYOND * most for most in self.most]
        for places, error in zip((_ROWS, _TOKENS), self.reach_errors, strict=True):
            if error <= _REACH_ERROR:
                for i in places:
                    found[i] = _REACH * self.most[i]
        return tuple(found)

    def region(self) -> dict[str, float]:
        """The largest value of each feature that was seen."""
        return {name: most for name, most in zip(FEATURES, self.most, strict=True) if most and name != "step"}


def _kind(features: Sequence[float]) -> StepKind:
    return int(features[1]).bit_length(), int(features[2]).bit_length()


def fit_steps(log: Sequence[AnyRow], first: Sequence[float], origin: float = 0.0) -> StepFit:
    """The fit to the steps of a log, times from `origin` on; without any it is that of the weights `first`."""
    between = _between(log)
    return fit_timed(
        [(at - origin, row, taken) for at, row, taken in timed_steps(log, between)], first, between
    )


def fit_timed(
    steps: Sequence[TimedStep], first: Sequence[float], between: float = 0.0, *, looks_ahead: bool = True
) -> StepFit:
    """The same of steps: when each began, what was in it, the seconds that it took. Unless it `looks_ahead`, it tells
    the usual time of steps alone: not how far it reaches, nor which kinds have the pace of a moment."""
    seen = [one for one in steps if one[2] > 0]
    if not seen:
        return StepFit(first, {}, MachinePace((), ()), (float("inf"),) * len(FEATURES), 0, 0.0, between)
    each = [_kind(features) for _, features, _ in seen]
    rare = frozenset(kind for kind, count in Counter(each).items() if count < _LEAST)
    names = [(_RARE, int(kind[1] > 0)) if kind in rare else kind for kind in each]
    numbers = {kind: i for i, kind in enumerate(dict.fromkeys(names))}
    kind_of = np.array([numbers[kind] for kind in names])
    begun = np.array([at for at, *_ in seen])
    features = np.array([(*row, float(row[2] > 0)) for _, row, _ in seen])
    seconds = np.array([taken for *_, taken in seen])
    weights, factors, moments, paces = _told_apart(
        features, seconds, kind_of, moments_of(begun), (*first, 0.0)
    )
    slowness = paces[moments]
    ratios = seconds / np.maximum(1e-12, products(features, weights) * factors[kind_of] * slowness)
    kinds = {}
    for kind, number in numbers.items():
        own = kind_of == number
        parts = (array("d", part[own].tolist()) for part in (begun, ratios, slowness))
        kinds[kind] = StepsOfKind(float(factors[number]), *parts)
    return StepFit(
        tuple(weights.tolist()), kinds, paced(begun, moments, paces),
        tuple(features.max(axis=0).tolist()[: len(FEATURES)]), len(seen),
        float(np.median(abs(ratios * slowness - 1))), between, levels_of(begun, slowness * ratios, seconds), rare,
        _reach_errors(seen, seconds / slowness, first) if looks_ahead else (math.inf, math.inf),
        pace_shares(moments, kind_of, ratios * slowness, [kind[1] > 0 for kind in numbers])
        if looks_ahead
        else (1.0, 1.0),
    )  # fmt: skip


def _reach_errors(steps: Sequence[TimedStep], usual: Floats, first: Sequence[float]) -> tuple[float, float]:
    """See StepFit. `usual` are the seconds of the steps without the pace of the machine."""
    found = []
    for place in (1, 2):
        values = np.array([features[place] for _, features, _ in steps])
        large = values > values.max() / 2
        if len(steps) < _REACH_STEPS or min(large.sum(), (~large & (values > 0)).sum()) < _REACH_STEPS // 8:
            found.append(math.inf)
            continue
        small = fit_timed(
            [one for one, is_large in zip(steps, large, strict=True) if not is_large],
            first,
            looks_ahead=False,
        )
        told, formula = usual[large], small.formula()
        guessed = np.array([formula(steps[i][1]) for i in np.flatnonzero(large).tolist()])
        found.append(float(np.median(abs(guessed / told - 1))))
    return found[0], found[1]


def _told_apart(
    features: Floats, seconds: Floats, kinds: np.ndarray, moments: np.ndarray, first: Sequence[float]
) -> tuple[Floats, Floats, np.ndarray, Floats]:
    """Weights, factors by kind, moments as they are, and paces by moment. What may be of the moment or of the kind is
    of the moment: it comes first."""
    weights, factors = fitted_weights(features, seconds, first), np.ones(kinds.max() + 1)
    for _ in range(_TURNS):
        plain = np.maximum(1e-12, products(features, weights))
        paces = pace_of(moments, seconds / (plain * factors[kinds]))
        usual = seconds / paces[moments]
        weights = fitted_weights(features, usual, first)
        plain = np.maximum(1e-12, products(features, weights))
        off = usual / plain
        factors = np.array([np.median(off[kinds == number]) for number in range(len(factors))])
    return weights, factors, moments, paces


def _between(log: Sequence[AnyRow]) -> float:
    """The median of the seconds from the tokens of a step to the next step, where there was one at once."""
    found: list[int] = []
    before: rows.Step | None = None
    for row in log:
        if isinstance(row, rows.Step):
            if before is not None:
                found.append(row.at - before.at - before.updated)
            before = row
        elif isinstance(row, (rows.Ended, rows.Aborted)):
            before = None  # nothing may be left
    return max(0.0, median(found) / 1e9) if found else 0.0


def timed_steps(log: Sequence[AnyRow], between: float = 0.0) -> Iterator[TimedStep]:
    """When each step began, what was in it, and how many seconds it took until the next one, or `between` after its end
    if nothing was left."""
    prompts: dict[int, int] = {}
    special: dict[int, int] = {}  # requests with an adapter: 5, with a grammar: 6
    live: dict[int, int] = {}  # samples that have not ended
    before: tuple[StepFeatures, rows.Step] | None = None
    idle = False
    for row in log:
        match row:
            case rows.Arrived():
                prompts[row.number] = row.prompt_tokens
                live[row.number] = int(row.params.get("n", 1))
                for place, trait in ((5, "adapter"), (6, "grammar")):
                    if trait in row.traits:
                        special[row.number] = place
            case rows.Ended():
                if live.get(row.number, 0) <= 1:
                    live.pop(row.number, None)
                else:
                    live[row.number] -= 1
                idle = not live
            case rows.Aborted():
                live.pop(row.number, None)
                idle = not live
            case rows.Step():
                if before is not None:
                    features, step = before
                    taken = step.updated / 1e9 + between if idle else (row.at - step.at) / 1e9
                    yield step.at / 1e9, features, taken
                before, idle = (_features(row, prompts, special), row), False
            case _:
                pass
    if before is not None:
        yield before[1].at / 1e9, before[0], before[1].updated / 1e9 + between


def _features(step: rows.Step, prompts: dict[int, int], special: dict[int, int]) -> StepFeatures:
    """cost_model.FEATURES of a step, as the scheduler counts them."""
    found = [1.0] + [0.0] * (len(FEATURES) - 1)
    flat, notes = step.rows, step.notes
    drafts = {notes[i]: notes[i + 2] for i in range(0, len(notes), 3) if notes[i + 1] == rows.DRAFTS}
    for i in range(0, len(flat), 4):
        key, start, tokens = flat[i : i + 3]
        number, drafted = key >> SAMPLE_BITS, drafts.get(i // 4, 0)
        own = tokens - drafted
        found[7] += drafted
        if own > 1 or start < prompts.get(number, 0):
            found[2] += own
            found[4] += own * (start + own / 2)
        else:
            found[1] += own
            found[3] += start + tokens
        if number in special:
            found[special[number]] += 1
    return tuple(found)
