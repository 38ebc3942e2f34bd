"""How long the steps of a log took: the cost model that the engine has, fitted to them, with what it misses.

A step lasts until the next one begins, where the engine had work: commands and reports between steps are part of it.
The model is a sum; what it misses for steps of one kind (decode rows, prompt tokens, each by powers of 2) is a factor
of that kind. The ratios of real to fitted times are kept by kind and in order, for a simulation to walk through: what
slows one step on a shared machine slows those after it, too.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from operator import mul
from statistics import median

from quire.core.cost_model import FEATURES, StepCostModel, StepFeatures, bend_of
from quire.records import dataclass
from quire.steplog import log_rows as rows
from quire.steplog.log_rows import SAMPLE_BITS, AnyRow

_LEAST = 8  # steps of a kind that has a factor
_BEYOND = 1.1  # of the largest value seen: outside of the region of a fit
_PASSES = 3  # over the steps of a short log
_WALK = 256  # steps that are taken in order, before a walk goes on elsewhere

StepKind = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StepFit:
    """Seconds of steps by cost_model.FEATURES. `ratios` are real over fitted times by kind, in order, their mean 1;
    `most` is the largest value of each feature that was seen, over `steps` steps; `error` the median of |ratio − 1|.
    """

    model: StepCostModel
    factors: dict[StepKind, float]
    ratios: dict[StepKind, Sequence[float]]
    most: tuple[float, ...]
    steps: int
    error: float

    def seconds(self, features: Sequence[float]) -> float:
        """The time of a step."""
        return self.model.seconds(features) * self.factors.get(_kind(features), 1.0)

    def formula(self) -> Callable[[Sequence[float]], float]:
        """`seconds` of the model as it is now, for many steps."""
        weights, bends, factors = self.model.weights, self.model.bends, self.factors

        def seconds(features: Sequence[float]) -> float:
            plain = factors.get(_kind(features), 1.0) * float(sum(map(mul, weights, features)))
            return plain * bend_of(bends, features[1], features[2]) if features[2] else plain

        return seconds

    def walk(self, rng: random.Random) -> Callable[[Sequence[float]], float]:
        """Draws by what steps differ from their formula: of steps of the same kind, in the order of the log."""
        every = [ratio for own in self.ratios.values() for ratio in own]
        cursors: dict[StepKind, int] = {}
        count, at = 0, rng.random()

        def draw(features: Sequence[float]) -> float:
            nonlocal count, at
            count += 1
            if count % _WALK == 0:
                at = rng.random()
                cursors.clear()
            kind = _kind(features)
            own = self.ratios.get(kind)
            if own is None:
                return rng.choice(every) if every else 1.0
            place = cursors.get(kind, int(at * len(own)))
            cursors[kind] = place + 1
            return own[place % len(own)]

        return draw

    def outside(self, features: Sequence[float]) -> bool:
        """Whether a step has more of something than any step that was seen."""
        return any(value > _BEYOND * most for value, most in zip(features, self.most, strict=True))

    def region(self) -> dict[str, float]:
        """The largest value of each feature that was seen."""
        return {name: most for name, most in zip(FEATURES, self.most, strict=True) if most and name != "step"}


def _kind(features: Sequence[float]) -> StepKind:
    return int(features[1]).bit_length(), int(features[2]).bit_length()


def fit_steps(log: Sequence[AnyRow], first: Sequence[float]) -> StepFit:
    """The fit to the steps of a log; without any it is that of the weights `first`."""
    seen = list(timed_steps(log))
    model = StepCostModel(first)
    for _ in range(1 if len(seen) > 1000 else _PASSES):
        for features, seconds in seen:
            model.observe(features, seconds)
    pairs = [(_kind(features), model.seconds(features), seconds) for features, seconds in seen]
    factors: dict[StepKind, float] = {}
    ratios: dict[StepKind, Sequence[float]] = {}
    for kind in {kind for kind, _, _ in pairs}:
        own = [(fitted, real) for one, fitted, real in pairs if one == kind]
        if len(own) >= _LEAST:
            factors[kind] = sum(real for _, real in own) / sum(fitted for fitted, _ in own)
            found = [real / fitted for fitted, real in own]
            mean = sum(found) / len(found)
            ratios[kind] = array("d", [ratio / mean for ratio in found])
    off = [abs(real / (fitted * factors.get(kind, 1.0)) - 1) for kind, fitted, real in pairs if fitted]
    return StepFit(
        model, factors, ratios, tuple(map(max, zip(*(one for one, _ in seen), strict=True)))
        if seen else (float("inf"),) * len(FEATURES),
        len(seen), median(off) if off else 0.0,
    )  # fmt: skip


def timed_steps(log: Sequence[AnyRow]) -> Iterator[tuple[StepFeatures, float]]:
    """What was in each step, and how many seconds it took until the next one, or to its end if nothing was left."""
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
                    yield features, (step.updated if idle else row.at - step.at) / 1e9
                before, idle = (_features(row, prompts, special), row), False
            case _:
                pass
    if before is not None:
        yield before[0], before[1].updated / 1e9


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
