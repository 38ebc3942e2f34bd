"""Mixed precision: more bits where they save most error, up to a mean number of bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """A format of a weight: its name, bits of a number, and the error that was measured."""

    name: str
    bits: float
    error: float


def choose(items: Mapping[str, tuple[int, Sequence[Choice]]], target: float) -> dict[str, str]:
    """The choice of each item, item -> (numbers, choices): of least total error with at most `target` bits on average.

    Every item begins with its fewest bits; the change that saves most error per bit is made until none has room. On
    the convex hull of each item's choices this is the optimum, but for the last change. Raises ValueError if the fewest
    bits are above the target.
    """
    total = sum(count for count, _ in items.values())
    hulls = {name: _hull(choices) for name, (_, choices) in items.items()}
    at = dict.fromkeys(items, 0)
    used = sum(items[name][0] * hull[0].bits for name, hull in hulls.items())
    if used > target * total + 1e-6:
        raise ValueError(
            f"target_bits: {target:g} is less than the {used / total:.3f} bits of the smallest formats"
        )
    steps = sorted(
        (
            ((before.error - after.error) / ((after.bits - before.bits) * items[name][0]), name, number)
            for name, hull in hulls.items()
            for number, (before, after) in enumerate(pairwise(hull), 1)
        ),
        key=lambda step: (-step[0], step[1], step[2]),
    )
    full: set[str] = set()
    for _, name, number in steps:
        if name in full or at[name] != number - 1:
            continue
        hull, count = hulls[name], items[name][0]
        more = (hull[number].bits - hull[number - 1].bits) * count
        if used + more > target * total + 1e-6:
            full.add(name)
            continue
        used, at[name] = used + more, number
    return {name: hulls[name][number].name for name, number in at.items()}


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """The choices from the fewest bits on, each saving less error per bit than the one before."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (each.bits, each.error)):
        if found and choice.error >= found[-1].error:
            continue
        while len(found) > 1 and _rate(found[-1], choice) >= _rate(found[-2], found[-1]):
            found.pop()
        if found and choice.bits == found[-1].bits:
            continue
        found.append(choice)
    return found


def _rate(one: Choice, other: Choice) -> float:
    return (one.error - other.error) / (other.bits - one.bits)
