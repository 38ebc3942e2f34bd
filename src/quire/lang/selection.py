"""Which of several choices is the most probable continuation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.draft_paths import agreement
from quire.lang.expressions import Rule
from quire.records import dataclass
from quire.types import RequestError


@dataclass(frozen=True, slots=True)
class Selection:
    """The result of a select: for each choice its score by the rule, and the log-probability of its tokens."""

    choice: str
    scores: dict[str, float]
    logprobs: dict[str, float]


def shared_tokens(prompt: Sequence[int], options: Sequence[Sequence[int]], choices: Sequence[str]) -> int:
    """How many tokens the prompt and all options begin with in common: what comes after them is scored.

    An option is the prompt and a choice, tokenized as one text: its first token may hold the end of the prompt. Raises
    RequestError for a choice that has no token, or none with one before it.
    """
    shared = min(agreement(prompt, option) for option in options)
    for choice, option in zip(choices, options, strict=True):
        if len(option) <= shared:
            raise RequestError("choices", f"{choice!r} adds no token")
    if not shared:
        raise RequestError(
            "choices", "the text before them has no token, so their first token has no probability"
        )
    return shared


def scores(options: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], by: Rule) -> list[float]:
    """The score of each option, given its tokens and their log-probabilities."""
    sums = [math.fsum(each) for each in logprobs]
    if by == "mean":
        return [total / len(each) for total, each in zip(sums, logprobs, strict=True)]
    logprob_of = dict(zip(map(tuple, options), sums, strict=True))
    return [_alone(option, logprob_of) for option in map(tuple, options)]


def _alone(option: tuple[int, ...], logprob_of: dict[tuple[int, ...], float]) -> float:
    """Log-probability of an option less that of the longer ones which it begins."""
    mine = logprob_of[option]
    longer = [o for o in logprob_of if len(o) > len(option) and o[: len(option)] == option]
    # an option that begins with another longer one is part of that one's probability
    nearest = [o for o in longer if not any(len(p) < len(o) and o[: len(p)] == p for p in longer)]
    if mine == -math.inf:
        return mine
    taken = math.fsum(math.exp(logprob_of[o] - mine) for o in nearest)
    return mine + math.log1p(-taken) if taken < 1 else -math.inf
