"""Which experts change places between ranks, and when."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.executor.base import I64, ExpertLoads
from quire.program.ranks import even_share
from quire.worker import expert_balance
from quire.worker.expert_balance import ExpertBalance, copies, divided, exchanges, rank_loads


def balanced(pairs: list[int], ranks: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Pairs by place after all exchanges, and these."""
    found = list(exchanges(np.array(pairs), ranks))
    for one, other in found:
        pairs[one], pairs[other] = pairs[other], pairs[one]
    return pairs, found


def test_busy_experts_are_spread() -> None:
    after, found = balanced([8, 8, 8, 8, 0, 0, 0, 0], 2)
    assert rank_loads(after, 2) == [16, 16]
    assert len(found) == 2


def test_what_is_even_stays() -> None:
    assert balanced([5, 1, 1, 5], 2)[1] == []
    assert balanced([0, 0, 0, 0], 2)[1] == []
    assert balanced([100, 100, 101, 100], 2)[1] == []  # not worth it


def test_one_busy_expert_cannot_be_divided() -> None:
    assert balanced([90, 1, 1, 1], 2)[1] == []


@given(st.lists(st.integers(0, 10_000), min_size=4, max_size=64), st.integers(2, 4))
def test_exchanges_end_and_each_one_helps(pairs: list[int], ranks: int) -> None:
    kept, places = sorted(pairs), list(pairs)
    highest = max(rank_loads(places, ranks))
    for one, other in exchanges(np.array(pairs), ranks):
        owners = [
            next(r for r in range(ranks) if p < even_share(len(pairs), ranks, r).stop) for p in (one, other)
        ]
        assert owners[0] != owners[1]
        places[one], places[other] = places[other], places[one]
        assert max(rank_loads(places, ranks)) <= highest
        highest = max(rank_loads(places, ranks))
    assert sorted(places) == kept


@given(
    st.lists(st.integers(0, 10_000), min_size=8, max_size=32),
    st.integers(1, 8),
    st.integers(2, 4),
    st.randoms(),
)
def test_copies_end_and_each_one_helps(
    loads: list[int], spare: int, ranks: int, chance: random.Random
) -> None:
    """From any places: all experts stay somewhere, and the busiest place never gets busier."""
    experts = len(loads)
    placed = [*range(experts), *(chance.randrange(experts) for _ in range(spare))]
    chance.shuffle(placed)

    def busiest() -> float:
        return max(loads[e] / placed.count(e) for e in range(experts))

    pairs = np.array([loads[e] // placed.count(e) for e in placed])
    before, highest, made = [*placed], busiest(), 0
    for one, other in copies(pairs, before, ranks):
        assert placed[one] != placed[other]
        placed[other], made = placed[one], made + 1
        assert {*placed} == {*range(experts)}
        assert busiest() <= highest
        highest = busiest()
    assert made <= 4 * spare
    after = divided(pairs, before, placed)
    totals = np.bincount(before, weights=pairs)
    assert np.abs(np.bincount(placed, weights=after) - totals).max() <= len(placed)


def test_a_busy_expert_is_divided() -> None:
    """On other ranks than it was; two of six places have copies."""
    placed = [0, 1, 2, 1, 3, 0]
    pairs = divided(np.array([300, 30, 30, 0, 10, 0]), placed, placed)
    assert pairs.tolist() == [150, 15, 30, 15, 10, 150]
    assert [*copies(pairs, placed, 3)] == [(0, 3)]
    after = divided(pairs, placed, [0, 1, 2, 0, 3, 0])
    assert after.tolist() == [100, 30, 30, 100, 10, 100]
    assert [*copies(after, [0, 1, 2, 0, 3, 0], 3)] == []


class Model:
    """Two layers of four experts on two ranks, whose router likes some of them: ExpertLoads, and its executor."""

    ranks, move = 2, True

    def __init__(self, likes: list[int], places: int = 4) -> None:
        self.placed = {layer: [place % 4 for place in range(places)] for layer in (0, 5)}
        self.likes = likes

    @property
    def at(self) -> dict[int, list[int]]:
        return self.placed

    @property
    def experts(self) -> ExpertLoads:
        return self

    def take_pairs(self) -> dict[int, I64]:
        return {layer: np.array([self.likes[e] // at.count(e) for e in at]) for layer, at in self.at.items()}

    def swap(self, layer: int, one: int, other: int) -> None:
        at = self.at[layer]
        at[one], at[other] = at[other], at[one]

    def copy(self, layer: int, one: int, other: int) -> None:
        self.at[layer][other] = self.at[layer][one]


def test_one_expert_with_most_of_the_load_is_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_balance, "_SHARE", 1e9)
    model = Model([900, 10, 20, 30], places=6)
    model.placed = {layer: [1, 1, 1, 2, 3, 0] for layer in model.placed}
    balance = ExpertBalance(model)
    for _ in range(2 * expert_balance.LOOK_STEPS):
        balance.step()
    for layer, pairs in model.take_pairs().items():
        assert {*model.at[layer]} == {0, 1, 2, 3}
        assert model.at[layer].count(0) == 3
        assert max(rank_loads(pairs, 2)) <= 640  # two of three copies, where 480 each were even
    balance.look()
    assert balance.ratios["expert"] == pytest.approx(900 / 240, rel=0.01)


def test_loads_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_balance, "_SHARE", 1e9)  # of a step's time
    model = Model([400, 300, 20, 10])
    balance = ExpertBalance(model)
    for _ in range(4 * expert_balance.LOOK_STEPS):
        balance.step()
    assert all(rank_loads([model.likes[e] for e in at], 2) == [320, 410] for at in model.at.values())
    assert balance.moved == 2
    assert sum(balance.pairs) == 4 * 2 * 730
    ratios = balance.ratios
    assert ratios["expert"] == pytest.approx(400 / 182.5, rel=0.01)
    assert 1.0 < ratios["rank"] < 1.2

    model.likes = [10, 400, 20, 300]  # now others
    for _ in range(8 * expert_balance.LOOK_STEPS):
        balance.step()
    assert all(max(rank_loads([model.likes[e] for e in at], 2)) <= 420 for at in model.at.values())


def test_pairs_from_before_an_exchange_are_not_those_of_the_experts_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted by place, as executors do. Each layer changes once, the second one long after the look."""
    now = [0.0]
    monkeypatch.setattr(expert_balance, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Counted(Model):
        def __init__(self) -> None:
            self.counts = {layer: np.zeros(4, np.int64) for layer in (0, 5)}
            super().__init__([400, 300, 20, 10])

        def ran(self) -> None:
            for layer, at in self.at.items():
                self.counts[layer] += [self.likes[expert] for expert in at]

        def take_pairs(self) -> dict[int, I64]:
            found, self.counts = self.counts, {layer: np.zeros(4, np.int64) for layer in self.at}
            return found

        def swap(self, layer: int, one: int, other: int) -> None:
            now[0] += 0.4  # 2 % of 20 s
            super().swap(layer, one, other)

    model = Counted()
    balance = ExpertBalance(model)
    for step in range(8 * expert_balance.LOOK_STEPS):
        balance.step()
        model.ran()
        now[0] += 0.1
        assert balance.moved <= 2, step
    assert balance.moved == 2
    assert balance.ratios["rank"] == pytest.approx(410 / 365, rel=0.01)


def test_exchanges_take_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(expert_balance, "time", SimpleNamespace(monotonic=lambda: now[0]))
    model = Model([400, 300, 20, 10])
    swap = model.swap

    def slow(layer: int, one: int, other: int) -> None:
        now[0] += 0.010
        swap(layer, one, other)

    monkeypatch.setattr(model, "swap", slow)
    balance = ExpertBalance(model)
    balance.look()
    before = 0
    for step in range(1, 200):
        now[0] += 0.020
        balance.step()
        if balance.moved == 2:
            assert step - before > 20  # 0.010 s are 2 % of 0.5 s
            return
        before = before or step * balance.moved
    raise AssertionError("two exchanges were due")


def test_large_experts_stay() -> None:
    class Large(Model):
        move = False

    balance = ExpertBalance(Large([400, 300, 20, 10]))
    for _ in range(3 * expert_balance.LOOK_STEPS):
        balance.step()
    assert balance.moved == 0
    assert balance.ratios["rank"] > 1.5


def test_a_model_without_experts_has_nothing_to_do() -> None:
    class Dense(Model):
        def take_pairs(self) -> dict[int, I64]:
            return {}

    balance = ExpertBalance(Dense([0]))
    for _ in range(expert_balance.LOOK_STEPS):
        balance.step()
    assert balance.ratios == {}
    assert balance.pairs == [0, 0]
