"""Who answers a request: names that stand for others, weighted splits, shadows and fallbacks.

Pure: it knows names, weights and keys, no requests, clocks or models, so that whatever passes requests on can use it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum

import msgspec

from quire.records import dataclass
from quire.routing.difficulty import AskedFor, DifficultyJudgement, DifficultyRule

_GOLDEN = 0.6180339887498949  # multiples modulo 1 are spread evenly (Weyl's sequence)
_POINTS = 2.0**-64


class Failure(StrEnum):
    """Why an answer did not come."""

    ERROR = "error"  # the model failed, or is not there
    OVERLOAD = "overload"  # it has too much to do
    DEADLINE = "deadline"  # not in time


def failure_of(status: int) -> Failure | None:
    """The kind of a failure that another model might not have, by its HTTP status; None for all other answers."""
    if status == 429:
        return Failure.OVERLOAD
    if status == 504:
        return Failure.DEADLINE
    return Failure.ERROR if status >= 500 else None


@dataclass(frozen=True, slots=True)
class Fallback:
    """Where a request goes after a failure `on` which it may try again."""

    target: str
    on: frozenset[Failure] = frozenset(Failure)


@dataclass(frozen=True, slots=True)
class TrafficRule:
    """What a name stands for: targets with their weights, which are models or names with rules of their own.

    A `shadow` gets copies of a `shadow_share` of the requests, whose answers nobody waits for. With a `difficulty` that
    chooses between the two targets, not their weights.
    """

    targets: tuple[tuple[str, float], ...]
    fallbacks: tuple[Fallback, ...] = ()
    shadow: str | None = None
    shadow_share: float = 1.0
    difficulty: DifficultyRule | None = None


class FallbackBody(msgspec.Struct, forbid_unknown_fields=True):
    """Another target, and the failures after which it is asked."""

    target: str
    on: tuple[Failure, ...] = tuple(Failure)


class RuleBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a name stands for, as requests and files say it; see TrafficRule."""

    targets: dict[str, float]
    fallbacks: list[FallbackBody] = []
    shadow: str | None = None
    shadow_share: float = 1.0

    def rule(self) -> TrafficRule:
        """The rule that it describes."""
        fallbacks = tuple(Fallback(each.target, frozenset(each.on)) for each in self.fallbacks)
        return TrafficRule(tuple(self.targets.items()), fallbacks, self.shadow, self.shadow_share)


@dataclass(frozen=True, slots=True)
class TrafficRoute:
    """Where one request goes: first to `target`; `fallbacks` in the order in which they were met. `judged`: what was
    decided by its difficulty."""

    target: str
    fallbacks: tuple[Fallback, ...] = ()
    shadow: str | None = None
    judged: DifficultyJudgement | None = None

    def after(self, failure: Failure, tried: Collection[str]) -> Fallback | None:
        """The next fallback after a failure, leaving out what was tried."""
        return next(
            (each for each in self.fallbacks if failure in each.on and each.target not in tried), None
        )


class TrafficRules:
    """The rules of all names. Raises ValueError for one that leads nowhere or back to itself, or has wrong weights."""

    def __init__(self, rules: Mapping[str, TrafficRule], models: Collection[str]) -> None:
        self._rules, self._models = dict(rules), frozenset(models)
        self._numbers = itertools.count(1)
        for name, rule in self._rules.items():
            self._check(name, rule)

    @property
    def names(self) -> list[str]:
        """The names that stand for others."""
        return [*self._rules]

    def __contains__(self, name: str) -> bool:
        return name in self._rules or name in self._models

    def route(self, name: str, key: str = "", asked: AskedFor = lambda: None) -> TrafficRoute:
        """Where a request for `name` goes. Requests with the same `key` go the same way while the rules stay, and most
        of them when weights change; those without one are spread evenly. `asked`: what its difficulty is seen by.
        Raises KeyError for an unknown name.
        """
        fallbacks: list[Fallback] = []
        judged: DifficultyJudgement | None = None
        shadow, number = None, next(self._numbers)
        while (rule := self._rules.get(name)) is not None:
            fallbacks += rule.fallbacks
            if shadow is None and rule.shadow is not None:
                copied = rule.shadow_share >= 1.0 or _point(f"shadow {name}", key, number) < rule.shadow_share
                shadow = rule.shadow if copied else None
            if rule.difficulty is None:
                name = _chosen(rule, _point(name, key, number))
            else:
                judged = rule.difficulty.judge(name, asked())
                name = judged.target
        if name not in self._models:
            raise KeyError(name)
        ends = [Fallback(end, each.on) for each in fallbacks for end in [self._end(each.target, key, number)]]
        copied_to = None if shadow is None else self._end(shadow, key, number)
        return TrafficRoute(name, tuple(ends), copied_to, judged)

    def leads_to(self, name: str, model: str) -> bool:
        """Whether requests for `name` may be answered by a model."""
        reached, pending = set[str](), [name]
        while pending:
            target = pending.pop()
            if target not in reached:
                reached.add(target)
                pending += named_by(self._rules[target]) if target in self._rules else ()
        return model in reached and model in self._models

    def _end(self, name: str, key: str, number: int) -> str:
        """The model that a name leads to; by difficulty the one for hard requests, as something has failed."""
        while (rule := self._rules.get(name)) is not None:
            hard = None if rule.difficulty is None else rule.difficulty.hard
            name = hard or _chosen(rule, _point(name, key, number))
        return name

    def _check(self, name: str, rule: TrafficRule) -> None:
        weights = [weight for _, weight in rule.targets]
        if not weights or not all(0 <= weight < float("inf") for weight in weights) or not sum(weights) > 0:
            raise ValueError(f"{name}: weights are numbers from 0 on, of which one is above 0")
        if not 0 <= rule.shadow_share <= 1:
            raise ValueError(f"{name}: the share of a shadow is from 0 to 1")
        for target in named_by(rule):
            if target not in self:
                raise ValueError(f"{name}: {target!r} is neither a model nor a name with a rule")
        reached, pending = set[str](), list(named_by(rule))
        while pending:
            target = pending.pop()
            if target == name:
                raise ValueError(f"{name}: leads back to itself")
            if target in self._rules and target not in reached:
                reached.add(target)
                pending += named_by(self._rules[target])


def named_by(rule: TrafficRule) -> Iterator[str]:
    """The models and names that a rule leads to."""
    yield from (target for target, _ in rule.targets)
    yield from (fallback.target for fallback in rule.fallbacks)
    if rule.shadow is not None:
        yield rule.shadow


def _point(name: str, key: str, number: int) -> float:
    """A number in [0, 1): of the key if there is one, else of the request's number."""
    if not key:
        return number * _GOLDEN % 1.0
    digest = hashlib.sha256(f"{len(name)} {name} {key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") * _POINTS


def _chosen(rule: TrafficRule, point: float) -> str:
    """The target whose part of the line from 0 to 1 has the point."""
    left = point * sum(weight for _, weight in rule.targets)
    for target, weight in rule.targets:
        left -= weight
        if left < 0:
            return target
    return next(target for target, weight in reversed(rule.targets) if weight > 0)
