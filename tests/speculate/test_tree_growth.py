"""Trees of the likeliest drafts, and what is learned of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from quire.executor.base import Guesses
from quire.speculate.proposer import DraftTree, Offer, Room
from quire.speculate.tree_growth import DraftPlace, GrowingTree, TreeGrowth


def place(growth: TreeGrowth, tokens: list[int], sure: list[float]) -> DraftPlace:
    return growth.places(Guesses(np.array([tokens], np.int32), np.array([sure], np.float32)))[0]


def test_a_tree_has_the_drafts_of_the_greatest_value() -> None:
    """Against all sets of drafts that are closed under parents and likelier siblings."""
    growth = TreeGrowth(3, 64)
    heads = [
        place(growth, [1, 2, 3], [0.6, 0.2, 0.1]),
        place(growth, [4, 5, 6], [0.5, 0.3, 0.05]),
        place(growth, [7, 8, -1], [0.9, 0.02, 0]),
    ]
    for one, then in itertools.pairwise(heads):
        one.below = [then] * len(one.token_ids)
    values = sorted(
        (
            float(np.prod([heads[depth].rates[rank].mean for depth, rank in enumerate(path)]))
            for length in (1, 2, 3)
            for path in itertools.product(*(range(len(head.token_ids)) for head in heads[:length]))
        ),
        reverse=True,
    )
    for count in (1, 2, 5, 9, 20, 64):
        tree = growth.drafts(heads[0], count)
        assert isinstance(tree, DraftTree)
        assert tree.is_tree()
        assert len(tree.token_ids) == min(count, len(values))
        made, at = [], [1.0]
        for token, parent, depth in zip(tree.token_ids, tree.parents, tree.depths(), strict=True):
            head = heads[depth - 1]
            at.append(at[parent] * head.rates[head.token_ids.index(token)].mean)
            made.append(at[-1])
        assert made == sorted(made, reverse=True)
        assert made == pytest.approx(values[:count])


def test_a_trunk_goes_on_while_it_would_have_one_of_the_best_drafts() -> None:
    growth = TreeGrowth(4)
    sure, unsure = ([0.95, 0.02, 0.01, 0.005], [0.2, 0.19, 0.18, 0.17])

    def tree(said: list[float], tokens: Sequence[int] = (1, 2, 3, 4)) -> GrowingTree:
        return GrowingTree(place(growth, list(tokens), said))

    assert [tip.token for tip in growth.go_on(tree(sure), Room(4, 3))] == [1]
    assert not growth.go_on(tree(unsure), Room(4, 3))
    assert growth.go_on(tree(unsure), Room(12, 3))
    deep = tree(sure)
    for _ in range(2):
        assert growth.go_on(deep, Room(12, 3))
        deep.add([place(growth, [1, 2, 3, 4], sure)])
    assert not growth.go_on(deep, Room(12, 3))
    assert not growth.go_on(tree([0.0] * 4, [-1] * 4), Room(12, 3))


def test_a_tree_goes_on_behind_its_likeliest_drafts() -> None:
    """EAGLE-2: at each depth the drafts of the greatest value, of any branch; the best of all of them are the tree.
    Against the definition, over a draft that says something of every path."""
    growth, rng = TreeGrowth(3, 2), random.Random(4)
    said: dict[tuple[int, ...], DraftPlace] = {}

    def of(path: tuple[int, ...]) -> DraftPlace:
        sure = sorted((rng.random() for _ in range(3)), reverse=True)
        said[path] = place(
            growth, [10 * len(path) + rank for rank in range(3)], [s / sum(sure) for s in sure]
        )
        return said[path]

    def value(path: tuple[int, ...]) -> float:
        places = [said[path[:at]] for at in range(len(path))]
        rates = [p.rates[p.token_ids.index(token)].mean for p, token in zip(places, path, strict=True)]
        return float(np.prod(rates))

    for count in (4, 9, 16):
        said.clear()
        tree, frontier, depth = GrowingTree(of(())), [()], 0
        while tips := growth.go_on(tree, Room(count, 4)):
            paths = [(*path, token) for path in frontier for token in said[path].token_ids]
            frontier = sorted(paths, key=lambda path: -value(path))[: len(tips)]
            assert [tuple(tip.path()) for tip in tips] == frontier
            assert len(tips) <= 2
            tree.add([of(path) for path in frontier])
            depth += 1
        assert depth <= 3
        every = [(*path, token) for path, at in said.items() for token in at.token_ids]
        made = growth.drafts(tree.root, count)
        assert isinstance(made, DraftTree)
        found: list[tuple[int, ...]] = [()]
        for token, parent in zip(made.token_ids, made.parents, strict=True):
            found.append((*found[parent], token))
        assert sorted(found[1:]) == sorted(sorted(every, key=lambda path: -value(path))[:count])
    assert any(len({path[:-1] for path in said if len(path) == deep}) > 1 for deep in (2, 3))


def test_what_is_said_of_a_token_is_learned() -> None:
    """Second choices that are right more often come first."""
    growth, rng = TreeGrowth(2), random.Random(1)
    for _ in range(400):
        root = place(growth, [1, 2], [0.5, 0.45])
        second = rng.random() < 0.7
        growth.learn(root, [2 if second else 1])
    root = place(growth, [1, 2], [0.5, 0.45])
    assert root.token_ids == [2, 1]
    assert [rate.mean for rate in root.rates] == pytest.approx([0.7, 0.3], abs=0.1)
    [chance] = growth.offer(8, 1.0).siblings
    assert chance > 0.9  # one of them always is
    assert place(growth, [1, 2], [0.99, 0.001]).token_ids == [1, 2]  # nothing is known of such ones


def test_chains_have_one_token_in_each_place() -> None:
    growth = TreeGrowth(1)
    root = place(growth, [5], [0.1])
    root.below[0] = place(growth, [6], [0.1])
    assert growth.drafts(root, 8) == [5, 6]
    assert growth.offer(8, 2.0) == Offer(8, 0, 2.0)
