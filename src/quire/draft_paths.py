"""How far drafts agree with tokens, and how deep the drafts of a tree are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def agreement(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common: of a chain of drafts, how many are right."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def draft_depths(parents: Sequence[int]) -> list[int]:
    """The depth of each draft of a tree, behind that of the last known token, which is 0."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found
