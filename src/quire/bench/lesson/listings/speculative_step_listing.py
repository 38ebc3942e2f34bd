"""Drafts are accepted so that tokens are distributed as the target's: the residual subtracts the whole draft."""

import numpy as np

from quire.reference.speculative_step import accept

DRAFT, TARGET = np.array([0.7, 0.2, 0.1]), np.array([0.4, 0.35, 0.25])
ROUNDS = 20_000


def with_one_probability(chance: np.random.Generator) -> int:
    """The mistake of some listings: after a rejection only the draft's own probability is subtracted, from all."""
    draft = int(chance.choice(3, p=DRAFT))
    if chance.random() * DRAFT[draft] < TARGET[draft]:
        return draft
    rest = np.maximum(TARGET - DRAFT[draft], 0)
    return int(chance.choice(3, p=rest / rest.sum())) if rest.any() else draft


def furthest(tokens: list[int]) -> float:
    return float(np.abs(np.bincount(tokens, minlength=3) / len(tokens) - TARGET).max())


def main() -> None:
    chance = np.random.default_rng(0)
    drafts = [int(chance.choice(3, p=DRAFT)) for _ in range(ROUNDS)]
    right = [accept([draft], [DRAFT], [TARGET, TARGET], chance)[0] for draft in drafts]
    wrong = [with_one_probability(chance) for _ in range(ROUNDS)]
    print("distributed as the target, within 0.01:", furthest(right) < 0.01)
    print("with one probability subtracted, off by more than 0.1:", furthest(wrong) > 0.1)
