"""Random draws that are equal on every machine and Python version, and that respect the train/eval split.

Only `random.Random.random` is used: it is the one method whose sequence Python promises to keep for a given seed.
"""

from __future__ import annotations

import enum
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# One combination in this many is held out of training.
HELD_OUT_ONE_IN = 16
_MAX_REDRAWS = 400


class Split(enum.StrEnum):
    """Which side of the fence a conversation is made for."""

    TRAIN = "train"
    EVAL = "eval"


def split_of(key: str) -> Split:
    """The only split that a combination may ever appear in."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return Split.EVAL if int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0 else Split.TRAIN


class NoCombinationError(Exception):
    """What was chosen so far leaves no combination of this split; the conversation is drawn anew."""


class Draw:
    """A stream of choices for one conversation.

    `keys` collects the combinations that make it what it is (operands of a sum, values of a record, …); every one
    hashes into `split`, so that two splits can never hold the same combination.
    """

    def __init__(self, seed: str, split: Split) -> None:
        self._random = random.Random(seed).random
        self.split = split
        self.keys: list[str] = []

    def below(self, n: int) -> int:
        """An integer in [0, n)."""
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + self.below(high - low + 1)

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def weighted(self, options: Sequence[tuple[T, float]]) -> T:
        """One of (value, weight) pairs."""
        at = self._random() * sum(weight for _, weight in options)
        for value, weight in options:
            at -= weight
            if at < 0:
                return value
        return options[-1][0]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """`count` options at different places, in random order. Raises NoCombinationError for fewer options."""
        pool = list(options)
        if count > len(pool):
            raise NoCombinationError(f"{count} of {len(pool)} options")
        for i in range(count):
            j = self.between(i, len(pool) - 1)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        return self.sample(options, len(options))

    def held(self, make: Callable[[], T], key: Callable[[T], str]) -> T:
        """Draw until the combination belongs to this split; note its key. Raises NoCombinationError."""
        for _ in range(_MAX_REDRAWS):
            value = make()
            name = key(value)
            if split_of(name) is self.split:
                self.keys.append(name)
                return value
        raise NoCombinationError(
            f"no {self.split} combination in {_MAX_REDRAWS} draws, the last was {name!r}"
        )

    def phrase(self, topic: str, options: Sequence[str]) -> str:
        """A wording from `options`; the pair (topic, wording) belongs to one split."""
        return self.held(lambda: self.pick(options), lambda text: f"{topic}|{text}")
