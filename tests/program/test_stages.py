"""Layers are cut into stages by what they cost."""

from __future__ import annotations

import itertools
import random

import pytest

from helpers.specs import F32, decoder_spec
from quire.program.lower import lower
from quire.program.ranks import RankPlan
from quire.program.stages import LayerCost, cut, layer_costs, stage_layers


def dearest(costs: list[LayerCost], counts: tuple[int, ...]) -> float:
    ends = [0, *itertools.accumulate(counts)]
    parts = [costs[first:stop] for first, stop in itertools.pairwise(ends)]
    return max(max(sum(each) for each in zip(*part, strict=True)) for part in parts)


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_has_a_cheaper_dearest_stage(seed: int) -> None:
    chance = random.Random(seed)
    costs = [LayerCost(chance.random(), chance.random()) for _ in range(chance.randint(2, 9))]
    stages = chance.randint(1, len(costs))
    found = cut(costs, stages)
    assert len(found) == stages
    assert sum(found) == len(costs)
    ways = [
        tuple(b - a for a, b in itertools.pairwise((0, *ends, len(costs))))
        for ends in itertools.combinations(range(1, len(costs)), stages - 1)
    ]
    assert min(found) >= 1
    assert dearest(costs, found) == pytest.approx(min(dearest(costs, way) for way in ways))


def test_a_wide_head_costs_layers_of_the_last_stage() -> None:
    small, wide = (lower(decoder_spec(vocab, 64, 64, (4, 2, 16), [0] * 8), F32) for vocab in (64, 64_000))
    assert stage_layers(small, 8, 2) == (4, 4)
    first, last = stage_layers(wide, 8, 2)
    assert first > 4 > last
    for program in (small, wide):
        for share in zip(*layer_costs(program, 8), strict=True):
            assert sum(share) == pytest.approx(1)


def test_no_cut() -> None:
    program = lower(decoder_spec(64, 64, 64, (4, 2, 16), [0] * 2), F32)
    assert stage_layers(program, 2, 1) == ()
    assert stage_layers(program, 2, 3) == ()  # which RankPlan.layers refuses
    assert RankPlan(pipeline_parallel_size=2, stage_layers=stage_layers(program, 2, 2)).layers(2) == range(1)
