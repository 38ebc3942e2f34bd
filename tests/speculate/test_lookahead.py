"""Lookahead decoding by itself: what its trees look like, and that its guesses become right."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest

from quire import LLM
from quire.config.speculative import SpeculativeConfig
from quire.speculate.lookahead import GRAM_BYTES, MOST_GRAMS, LookaheadProposer
from quire.speculate.proposer import Room
from quire.types import NewSeq, SamplingParams

Model = Callable[[list[int]], int]


def config(window: int = 3, ngram: int = 3, guesses: int = 2) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="lookahead", num_speculative_tokens=64,
        lookahead_window=window, lookahead_ngram=ngram, lookahead_guesses=guesses,
    )  # fmt: skip


def new_seq(tokens: list[int]) -> NewSeq:
    return NewSeq(0, tokens, len(tokens), SamplingParams(), 0, 0, ([],))


def play(chosen: SpeculativeConfig, model: Model, text: list[int], length: int) -> int:
    """Write a text on to a length; how many steps that took."""
    drawn: dict[int, list[int]] = {}
    proposer = LookaheadProposer(chosen, drawn)
    proposer.start(new_seq(text))
    steps = 0
    while len(text) < length:
        steps += 1
        [offer] = proposer.look([0], 64).values()
        tree = proposer.propose({0: Room(offer.length, offer.depth)})[0]
        assert not isinstance(tree, list)
        assert tree.is_tree()
        assert len(tree.token_ids) <= offer.length == chosen.lookahead_drafts
        assert max(tree.depths(), default=0) <= offer.depth
        assert len(set(zip(tree.parents, tree.token_ids, strict=True))) == len(tree.token_ids)
        paths: list[list[int]] = [[]]
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            paths.append([*paths[parent], token])
        drawn[0] = [model(text + path) for path in paths]
        made = [drawn[0][0]]
        while made in paths:
            made.append(drawn[0][paths.index(made)])
        proposer.extend(0, made)
        text = text + made
    return steps


@pytest.mark.parametrize(
    ("window", "ngram", "guesses"), [(3, 3, 2), (1, 2, 1), (5, 4, 5), (4, 2, 3), (2, 8, 4)]
)
def test_guesses_become_right(window: int, ngram: int, guesses: int) -> None:
    steps = play(config(window, ngram, guesses), lambda text: (7 * text[-1] + 3) % 61, [5], 400)
    assert steps < 260  # the text repeats after 60 tokens


def test_the_window_finds_what_never_stood_in_the_text() -> None:
    """Each token comes once; what follows a guess is the same wherever it stands."""
    once = lambda text: (7 * text[-1] + 3) % 1009  # noqa: E731
    known = random.Random(1).sample(range(1009), 40)
    assert play(config(8, 4, 3), once, known, 500) < 440


def test_of_noise_nothing_is_guessed() -> None:
    rng = random.Random(2)
    assert play(config(), lambda text: rng.randrange(10**6), [1, 2], 100) >= 96


def test_the_pool_is_bounded() -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    proposer = LookaheadProposer(config(ngram=8, guesses=4), {})
    proposer.start(new_seq([1]))
    rng = random.Random(3)
    for _ in range(40):
        proposer.extend(0, [rng.randrange(150_000) for _ in range(100)])
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert MOST_GRAMS * GRAM_BYTES // 2 < held < MOST_GRAMS * GRAM_BYTES


def test_a_tree_beyond_the_most_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens: 16 is below the 43 drafts of a tree"):
        LLM(
            "unused",
            speculative_config={"method": "lookahead", "lookahead_window": 15, "lookahead_guesses": 7},
        )
