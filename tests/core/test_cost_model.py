"""The cost model against machines whose costs are known."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator

import pytest

from quire.core.cost_model import FEATURES, StepCostModel, StepFeatures

TRUE = (0.012, 4e-4, 3e-4, 2e-7, 4e-9, 2e-3, 3e-4, 2e-4)


def seconds(features: StepFeatures, costs: tuple[float, ...] = TRUE) -> float:
    return sum(x * cost for x, cost in zip(features, costs, strict=True))


def steps(rng: random.Random, *, prompts: bool = True) -> Iterator[StepFeatures]:
    """Steps as a server has them: streams come and go, contexts grow, prompts come in chunks."""
    rows, context = 8, 800
    while True:
        rows = max(1, min(64, rows + rng.choice([-1, 0, 0, 1])))
        context = max(50, min(4000, context + rng.randint(-40, 45)))
        chunk = rng.choice([0, 0, 0, 128, 448, 512]) if prompts else 0
        before = rng.randint(0, 6000) if chunk else 0
        adapters = rng.randint(0, rows) if rng.random() < 0.2 else 0
        grammars = rng.randint(0, rows) if rng.random() < 0.2 else 0
        drafts = rng.randint(1, 20) if rng.random() < 0.2 else 0
        yield 1.0, rows, chunk, rows * context, chunk * (before + chunk / 2), adapters, grammars, drafts


def learn(
    model: StepCostModel, made: Iterator[StepFeatures], count: int, rng: random.Random, factor: float = 1.0
) -> None:
    """Steps with 5 % of noise, of which one in twenty is hit by other work and takes up to four times as long."""
    for features in itertools.islice(made, count):
        noise = rng.gauss(1, 0.05) * (rng.uniform(1.5, 4) if rng.random() < 0.05 else 1)
        model.observe(features, factor * noise * seconds(features))


@pytest.mark.parametrize("seed", range(3))
def test_predictions_are_those_of_the_machine(seed: int) -> None:
    rng = random.Random(seed)
    model = StepCostModel()
    learn(model, steps(rng), 1500, rng)
    for features in itertools.islice(steps(random.Random(9)), 50, 400):
        assert model.seconds(features) == pytest.approx(seconds(features), rel=0.15)
    assert model.error < 0.08
    assert 0.05 < model.spread < 0.35
    assert min(model.weights) >= 0


def test_what_is_known_of_prompts_outlasts_hours_without_them() -> None:
    rng = random.Random(1)
    model = StepCostModel()
    learn(model, steps(rng), 800, rng)
    learn(model, steps(rng, prompts=False), 6000, rng)
    chunk: StepFeatures = (1.0, 8, 512, 8 * 900, 512 * 1500, 0, 0, 0)
    assert model.seconds(chunk) == pytest.approx(seconds(chunk), rel=0.15)


def test_a_machine_that_slows_down_is_followed_within_a_few_steps() -> None:
    rng = random.Random(2)
    model = StepCostModel()
    learn(model, steps(rng), 800, rng)
    learn(model, steps(rng), 120, rng, factor=2.0)
    for features in itertools.islice(steps(random.Random(3)), 100):
        assert model.seconds(features) == pytest.approx(2 * seconds(features), rel=0.3)


def test_costs_begin_where_the_last_run_ended() -> None:
    rng = random.Random(4)
    model = StepCostModel()
    learn(model, steps(rng), 800, rng)
    again = StepCostModel.load(json.loads(json.dumps(model.dump())))
    features: StepFeatures = (1.0, 4, 256, 4000, 256 * 300, 0, 0, 0)
    assert again.seconds(features) == pytest.approx(model.seconds(features))
    learn(again, steps(rng), 20, rng)
    assert again.seconds(features) == pytest.approx(seconds(features), rel=0.2)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"features": ["step"]},
        {"seconds": [0.1]},
        {"seconds": [float("nan")] * 8},
        {"seconds": [-1.0] * 8},
        {"seconds": ["1"] * 8},
        {"seconds": [0.0] * 8},
        {"seconds": None},
    ],
)
def test_a_file_with_anything_else_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cost model"):
        StepCostModel.load(StepCostModel().dump() | change)


def test_times_that_cannot_be_are_ignored() -> None:
    model = StepCostModel()
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        model.observe((1.0,) * len(FEATURES), wrong)
    assert model.steps == 0


def test_the_cost_of_one_token_and_of_a_prompt() -> None:
    model = StepCostModel(TRUE)
    assert model.token_seconds() == pytest.approx(TRUE[0] + TRUE[1])
    assert model.prompt_seconds(1024) == pytest.approx(2 * TRUE[0] + 1024 * TRUE[2] + TRUE[4] * 1024**2 / 2)


def test_nothing_grows_with_the_steps() -> None:
    rng, model = random.Random(5), StepCostModel()
    learn(model, steps(rng), 3000, rng)
    assert len(model._kinds) <= 16
    assert all(len(kind.matrix) == len(FEATURES) for kind in model._kinds.values())
