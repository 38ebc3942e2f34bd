"""Drafts are run where they raise the tokens accepted per second, and nowhere else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

import pytest

from quire.speculate.allotment import Allotment
from quire.speculate.proposer import Offer, Room
from quire.speculate.step_costs import PassCosts, StepCosts


def learned(cost: object, rows: int, most: int = 8) -> Allotment:
    """An allotment that has seen steps of all sizes; `cost(tokens)` are their seconds."""
    made = Allotment(most, rows, 1)
    for _ in range(20):
        for tokens in range(1, rows + most + 1):
            made.observe_step(tokens, cost(tokens))  # type: ignore[operator]
    for seq_id in range(rows):
        made.start(seq_id)
    return made


def offers(rows: int, count: int = 8) -> dict[int, Offer]:
    return {seq_id: Offer(count, 0) for seq_id in range(rows)}


def share(allotment: Allotment, rows: int, offered: Mapping[int, Offer]) -> dict[int, int]:
    """Drafts by sequence."""
    return {seq_id: room.drafts for seq_id, room in allotment.share(rows, offered).items()}


def accept(allotment: Allotment, seq_id: int, rate: float, rows: int = 400) -> None:
    """Let a share of single drafts of a sequence be right."""
    done = 0.0
    for _ in range(rows):
        done += rate
        allotment.observe(seq_id, 0, [int(done) > 0])
        done -= int(done)


def test_free_drafts_of_a_good_sequence_are_all_run() -> None:
    allotment = learned(lambda tokens: 1.0, 1)
    accept(allotment, 0, 0.9)
    assert share(allotment, 1, offers(1)) == {0: 8}


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_the_number_is_that_of_the_formula(rate: float) -> None:
    """Expected tokens (1 - a^(k+1)) / (1 - a) over the cost 1 + r k have their maximum at k."""
    slope = 0.15
    allotment = learned(lambda tokens: 1 + slope * (tokens - 1), 1)
    accept(allotment, 0, rate)
    measured = allotment.rate(0, 0)
    gains = [(1 - measured ** (k + 1)) / (1 - measured) / (1 + slope * k) for k in range(9)]
    best = max(range(9), key=gains.__getitem__)
    assert share(allotment, 1, offers(1)).get(0, 0) == (best if gains[best] > 1.02 else 0)


def test_steps_that_cost_what_their_tokens_cost_run_none() -> None:
    allotment = learned(float, 16)
    for seq_id in range(16):
        accept(allotment, seq_id, 0.9)
    assert share(allotment, 16, offers(16)) == {}


def test_drafts_go_to_the_sequences_that_use_them() -> None:
    allotment = learned(lambda tokens: 1.0 if tokens <= 8 else 10.0, 4)
    for seq_id, rate in enumerate([0.95, 0.2, 0.2, 0.2]):
        accept(allotment, seq_id, rate)
    counts = share(allotment, 4, offers(4))
    assert sum(counts.values()) == 4
    assert counts[0] >= 3


def test_a_hopeless_sequence_is_tried_again_ever_more_rarely() -> None:
    allotment = learned(lambda tokens: 1 + 0.2 * (tokens - 1), 1)
    accept(allotment, 0, 0.0, 20)
    tried = []
    for step in range(3000):
        if counts := share(allotment, 1, offers(1)):
            assert counts == {0: 1}
            allotment.observe(0, 0, [False])
            tried.append(step)
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert 2 <= len(tried) < 12
    assert gaps == sorted(gaps)


def test_a_sequence_that_becomes_predictable_gets_drafts_again() -> None:
    allotment = learned(lambda tokens: 1.0, 1)
    accept(allotment, 0, 0.0, 60)
    for _ in range(2000):
        for seq_id, count in share(allotment, 1, offers(1)).items():
            allotment.observe(seq_id, 0, [True] * count)
    assert share(allotment, 1, offers(1)) == {0: 8}


def throughput(cost: Callable[[int], float], rate: float, streams: int, price: float) -> float:
    """Tokens per unit of time of streams whose drafts are right with a chance. Steps take `cost`, and some far more; a
    pass that makes drafts takes `price`.
    """
    rng = random.Random(1)
    passes = PassCosts(streams, price) if price else None
    allotment = Allotment(64, 32, 1, passes)
    for seq_id in range(streams):
        allotment.start(seq_id)
    made, seconds, offered = 0, 0.0, offers(streams)
    for _ in range(STEPS):
        counts = share(allotment, streams, offered)
        for depth in range(max(counts.values(), default=0) if passes else 0):
            passed = price * (1 + abs(rng.gauss(0, 0.05)))
            seconds += passed
            passes.observe(sum(count > depth for count in counts.values()), passed)  # type: ignore[union-attr]
        tokens = streams + sum(counts.values())
        took = cost(tokens) * (1 + abs(rng.gauss(0, 0.05))) * (2.0 if rng.random() < 0.03 else 1.0)
        seconds += took
        allotment.observe_step(tokens, took)
        for seq_id, count in counts.items():
            accepted = next((k for k in range(count) if rng.random() >= rate), count)
            allotment.observe(seq_id, 0, [place < accepted for place in range(min(accepted + 1, count))])
            made += accepted
        made += streams
    return made / seconds * 1.04 * 1.03  # what the noise takes, on average


STEPS = 500
COSTS = {
    "memory until 16": lambda n: 1 + 0.008 * (n - 1) + max(0, n - 16) * 0.05,
    "steep": lambda n: 1 + 0.08 * (n - 1),
    "compute": lambda n: 0.3 + 0.7 * n,
}


@pytest.mark.parametrize("price", [0.0, 0.12])
@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
def test_a_machine_with_accidents_is_never_slower_and_near_the_best(
    cost: Callable[[int], float], streams: int, price: float
) -> None:
    for rate in (0.0, 0.5, 0.8):
        rates = [
            streams * sum(rate**k for k in range(count + 1)) / (cost(streams * (count + 1)) + count * price)
            for count in range(9)
            if streams * count <= 64
        ]
        reached = throughput(cost, rate, streams, price)
        assert reached > 0.97 * rates[0]
        assert reached > 0.8 * max(rates)


def test_one_pass_makes_the_drafts_of_all_sequences() -> None:
    """The best sequence alone would not pay for the passes."""
    made = PassCosts(8, 0.4)
    allotment = Allotment(16, 4, 1, made)
    for _ in range(20):
        for tokens in range(1, 21):
            allotment.observe_step(tokens, 1.0)
    for seq_id, rate in enumerate([0.99, 0.9, 0.9, 0.9]):
        allotment.start(seq_id)
        accept(allotment, seq_id, rate)
    counts = share(allotment, 4, offers(4))
    assert len(counts) == 4
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_step_without_drafts_is_measured_now_and_then() -> None:
    """Else a cost that was measured at a bad moment would stay."""
    allotment = Allotment(8, 1, 1)
    allotment.start(0)
    empty = 0
    for _ in range(1000):
        counts = share(allotment, 1, offers(1))
        empty += not counts
        drafts = counts.get(0, 0)
        allotment.observe_step(
            1 + drafts, 100.0 if not drafts and empty == 1 else 1.0
        )  # the first one is an accident
        if drafts:
            allotment.observe(0, 0, [True] * drafts)
    assert 10 < empty < 60
    assert allotment.costs.curve[1] == pytest.approx(allotment.costs.curve[2], rel=0.1)


def test_costs_follow_a_machine_that_becomes_slower_as_a_whole() -> None:
    costs = StepCosts(8)
    for _ in range(50):
        for tokens in (1, 4, 8):
            costs.observe(tokens, 1 + tokens / 8)
    before = list(costs.curve)
    for _ in range(50):
        for tokens in (1, 4, 8):
            costs.observe(tokens, 3 * (1 + tokens / 8))
    ratio = before[8] / before[1]
    assert costs.curve[8] / costs.curve[1] == pytest.approx(ratio, rel=0.1)
    assert ratio == pytest.approx(2 / 1.125, rel=0.1)


def test_one_accident_does_not_change_costs_much() -> None:
    costs = StepCosts(4)
    for _ in range(50):
        for tokens in (1, 2, 3, 4):
            costs.observe(tokens, 1.0)
    costs.observe(3, 100.0)
    for _ in range(16):
        costs.observe(1, 1.0)
    assert costs.curve[3] / costs.curve[1] < 1.25


def test_a_size_whose_first_step_was_an_accident_is_tried_again() -> None:
    costs = StepCosts(20)
    for tokens, seconds in ((1, 1.0), (1, 1.0), (1, 1.0), (17, 30.0), (2, 2.0)):
        costs.observe(tokens, seconds)
    assert costs.curve[2] < 1.1  # a step alone says little
    costs.observe(2, 1.1)
    assert (
        costs.curve[3] < 1.3 < costs.curve[5]
    )  # the next size goes on as before; of others the large step is all there is
    for tokens in (3, 3, 4, 4, 5, 5):
        costs.observe(tokens, 1.0 + 0.1 * (tokens - 1))
    assert costs.curve[6] < 1.6


def test_a_tree_is_run_whole_or_not_at_all() -> None:
    slope = 0.05
    for rate, whole in ((0.7, True), (0.1, False)):
        allotment = learned(lambda tokens: 1 + slope * (tokens - 1), 1)
        accept(allotment, 0, rate)
        tree = {0: Offer(8, 0, depth=3)}
        assert allotment.share(1, tree) == ({0: Room(8, 3)} if whole else {})
    tried = [share(allotment, 1, tree) for _ in range(600)]
    assert tried[0] == {}
    assert {0: 8} in tried


def test_trees_share_what_a_step_may_run() -> None:
    allotment = learned(lambda tokens: 1.0, 3)
    for seq_id, rate in enumerate((0.5, 0.9, 0.7)):
        accept(allotment, seq_id, rate)
    assert share(allotment, 3, {seq_id: Offer(3, 0, depth=2) for seq_id in range(3)}) == {1: 3, 2: 3}


@pytest.mark.parametrize("spread", [1, 2, 64])
def test_a_tree_has_the_drafts_that_are_worth_it(spread: int) -> None:
    """With free rows all; where they cost, the likeliest ones: a sibling before the third place."""
    tree = {0: Offer(8, 0, depth=4, siblings=(0.6, 0.3), spread=spread)}
    free = learned(lambda tokens: 1.0, 1)
    accept(free, 0, 0.5)
    assert free.share(1, tree)[0].drafts == 8
    dear = learned(lambda tokens: 1 + 0.16 * (tokens - 1), 1)
    accept(dear, 0, 0.5)
    # 0.5 for the first, 0.3 for its sibling, 0.25 and 0.15 behind the first
    assert dear.share(1, tree) == {0: Room(3, 2)}
    none = learned(lambda tokens: 1 + 0.6 * (tokens - 1), 1)
    accept(none, 0, 0.5)
    assert none.share(1, tree) == {}


def test_a_sibling_needs_no_pass() -> None:
    """Where passes cost more than rows, a tree is broad, not deep."""
    tree = {0: Offer(8, 0, depth=8, siblings=(0.5, 0.5))}
    rooms = []
    for price in (0.01, 0.4):
        passes = PassCosts(8, price)
        allotment = Allotment(8, 1, 1, passes)
        for _ in range(20):
            for tokens in range(1, 10):
                allotment.observe_step(tokens, 1 + 0.02 * tokens)
        allotment.start(0)
        accept(allotment, 0, 0.6)
        rooms.append(allotment.share(1, tree)[0])
    assert rooms[0].depth > rooms[1].depth
    assert rooms[1].drafts > rooms[1].depth


def test_a_sequence_that_rests_tries_one_draft_of_a_tree() -> None:
    tree = {0: Offer(8, 0, depth=8, siblings=(0.2,))}
    allotment = learned(lambda tokens: 1 + 0.1 * (tokens - 1), 1)
    accept(allotment, 0, 0.0)
    tried = [allotment.share(1, tree) for _ in range(600)]
    assert {0: Room(1, 1)} in tried
    assert tried.count({}) > 590
