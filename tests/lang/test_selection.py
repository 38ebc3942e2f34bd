"""Scores of choices: exact for choices that begin each other, and the first one on ties."""

from __future__ import annotations

import math
import random

import pytest

from quire.lang.selection import scores, shared_tokens
from quire.types import RequestError

HALF = math.log(0.5)


def test_options_are_scored_after_the_tokens_that_all_of_them_share() -> None:
    assert shared_tokens([1, 2], [[1, 2, 3], [1, 2, 4, 5]], "ab") == 2
    assert shared_tokens([1, 2], [[1, 9], [1, 2, 3]], "ab") == 1  # the first one merges into the prompt's end
    with pytest.raises(RequestError, match="'b' adds no token"):
        shared_tokens([1, 2], [[1, 2, 3], [1, 2]], "ab")
    with pytest.raises(RequestError, match="the text before them has no token"):
        shared_tokens([], [[1], [2]], "ab")


def test_both_rules() -> None:
    options, logprobs = [(1,), (2, 3)], [[math.log(0.3)], [HALF, HALF]]
    assert scores(options, logprobs, "sum") == pytest.approx([math.log(0.3), 2 * HALF])
    assert scores(options, logprobs, "mean") == pytest.approx([math.log(0.3), HALF])


def test_a_choice_that_begins_others_counts_without_them() -> None:
    """Against the sum over all continuations of a random model."""
    rng = random.Random(1)
    for _ in range(50):
        model = {path: [rng.random() for _ in range(3)] for path in [(), *paths(3), *paths(3, 2)]}
        for weights in model.values():
            weights[:] = [w / sum(weights) for w in weights]
        options = rng.sample([*paths(3), *paths(3, 2), *paths(3, 3)], 6)
        logprobs = [[math.log(model[o[:i]][o[i]]) for i in range(len(o))] for o in options]
        found = scores(options, logprobs, "sum")
        for option, score in zip(options, found, strict=True):
            mine = sum(
                math.prod(model[whole[:i]][whole[i]] for i in range(3))
                for whole in paths(3, 3)
                if max((o for o in options if whole[: len(o)] == o), key=len, default=None) == option
            )
            assert math.exp(score) == pytest.approx(mine, abs=1e-12)


def paths(width: int, length: int = 1) -> list[tuple[int, ...]]:
    shorter = paths(width, length - 1) if length > 1 else [()]
    return [(*path, i) for path in shorter for i in range(width)]


def test_impossible_and_certain_continuations() -> None:
    assert scores([(1,), (2,)], [[-math.inf], [HALF]], "sum") == [-math.inf, HALF]
    assert scores([(1,), (1, 2)], [[HALF], [HALF, 0.0]], "sum") == [-math.inf, HALF]
    assert scores([(1,), (1, 2)], [[-math.inf], [-math.inf, 0.0]], "mean") == [-math.inf, -math.inf]
