"""The cost model against machines whose costs are known."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator

import pytest

from quire.core.cost_model import FEATURES, StepCostModel, StepFeatures, worst_margin
from quire.core.forecast import Demand, Live, outlook

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


@pytest.mark.parametrize("slower", ["streams", "prompts"])
def test_what_slows_streams_makes_no_prompt_dearer_and_the_other_way_round(slower: str) -> None:
    """The two drift apart within 120 steps, long before the fit forgets what it knew."""
    rng = random.Random(6)
    model = StepCostModel()
    learn(model, steps(rng), 800, rng)
    factors = [1.6 if (i in {2, 4}) == (slower == "prompts") else 1.0 for i in range(len(FEATURES))]
    now = tuple(cost * factor for cost, factor in zip(TRUE, factors, strict=True))
    rows, chunk = (1.0, 16, 0, 16 * 900, 0.0, 0, 0, 0), (1.0, 0, 512, 0, 512 * 256.0, 0, 0, 0)
    for _ in range(60):
        for features in (rows, chunk):
            model.observe(features, rng.gauss(1, 0.05) * seconds(features, now))
    # A chunk of 512 tokens is 155 ms of prompt and 12 ms of a step: those are of the other drift.
    assert model.seconds(rows) == pytest.approx(seconds(rows, now), rel=0.12)
    assert model.seconds(chunk) == pytest.approx(seconds(chunk, now), rel=0.12)
    assert model.weights[2] / TRUE[2] == pytest.approx(factors[2], rel=0.2)


def bounded(features: StepFeatures) -> float:
    """A machine whose short steps are bound by reading weights, and whose kernels have steps of their own."""
    tokens = features[1] + features[2]
    reading = 0.005 if tokens < 3 else 0.0075
    return max(reading, 0.0025 + 0.0005 * features[1] + 0.0003 * features[2]) + 2e-8 * features[3]


def test_short_prompts_take_what_no_sum_says() -> None:
    """And a forecast says the same as the model."""
    rng = random.Random(7)
    model = StepCostModel()
    shapes = [(rows, 2**i + rng.randint(0, 2**i - 1)) for rows in (0, 1, 3, 8) for i in range(9)]
    made = [(1.0, rows, tokens, 400 * rows, tokens**2 / 2, 0, 0, 0) for rows, tokens in shapes]
    for _ in range(40):
        for features in rng.sample(made, len(made)):
            streams = (1.0, max(1, features[1]), 0, 400 * max(1, features[1]), 0.0, 0, 0, 0)
            for one in (features, streams, streams):
                model.observe(one, rng.gauss(1, 0.03) * bounded(one))
    bent = [abs(model.seconds(one) / bounded(one) - 1) for one in made]
    plain = [abs(StepCostModel(model.weights).seconds(one) / bounded(one) - 1) for one in made]
    assert sorted(bent)[len(bent) * 9 // 10] < 0.08
    assert sorted(plain)[len(plain) * 9 // 10] > 0.12  # the control
    _, rows, tokens, context, work, *_ = next(one for one in made if one[1] == 3 and one[2] >= 8)
    lives = [Live((0.0,), True, Demand(0, int(context / rows), 99.0)) for _ in range(int(rows))]
    new = Live((1.0,), False, Demand(int(tokens), 0, 5.0))
    played = outlook(model.weights, lives, new, budget=512, slots=8, tokens=9999, bends=model.bends)
    assert played.ttft == pytest.approx(model.seconds((1.0, rows, tokens, context, work, 0, 0, 0)), rel=1e-6)
    again = StepCostModel.load(json.loads(json.dumps(model.dump())))
    assert [again.seconds(one) for one in made] == pytest.approx(
        [model.seconds(one) for one in made], rel=1e-3
    )
    assert worst_margin(0.1, model.bends) >= 0.1
    for one in made:  # a guarantee is for the longest that was seen
        assert model.seconds(one) <= StepCostModel(model.weights).seconds(one) * (
            1 + worst_margin(0.0, model.bends)
        )


def test_short_prompts_say_nothing_of_long_ones() -> None:
    """What begins with each prompt, as 6 ms of an engine that was idle, is no price of its tokens."""
    rng, model = random.Random(8), StepCostModel()
    short: StepFeatures = (1.0, 0, 2, 0, 2.0, 0, 0, 0)
    for _ in range(300):
        model.observe(short, rng.gauss(1, 0.05) * 0.014)
        for context in range(5, 25):
            model.observe((1.0, 1, 0, context, 0.0, 0, 0, 0), rng.gauss(1, 0.05) * 0.008)
    assert model.seconds(short) == pytest.approx(0.014, rel=0.1)
    long: StepFeatures = (1.0, 0, 512, 0, 512 * 256.0, 0, 0, 0)
    assert model.seconds(long) < 2 * StepCostModel().seconds(
        long
    )  # a line through both gives six times as much


def test_costs_begin_where_the_last_run_ended() -> None:
    rng = random.Random(4)
    model = StepCostModel()
    learn(model, steps(rng), 800, rng)
    again = StepCostModel.load(json.loads(json.dumps(model.dump())))
    features: StepFeatures = (1.0, 4, 256, 4000, 256 * 300, 0, 0, 0)
    assert again.seconds(features) == pytest.approx(model.seconds(features))
    learn(again, steps(rng), 20, rng)
    assert again.seconds(features) == pytest.approx(seconds(features), rel=0.2)


def test_what_no_step_has_costs_the_same_after_many_runs() -> None:
    """Nor what one step had. Each run meets a machine that has become slower by half."""
    first, rng, model = StepCostModel().weights, random.Random(5), StepCostModel()
    plain = (features for features in steps(rng) if not any(features[5:]))
    for run in range(12):
        learn(model, plain, 60, rng, 1.5**run)
        model.observe((1.0, 2.0, 0.0, 300.0, 0.0, 2.0, 2.0, 4.0), 0.02 * 1.5**run)
        model = StepCostModel.load(model.dump())
    assert model.weights[5:] == pytest.approx(first[5:])
    assert model.weights[0] > 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"features": ["step"]},
        {"seconds": [0.1]},
        {"seconds": [float("nan")] * 8},
        {"seconds": [-1.0] * 8},
        {"seconds": ["1"] * 8},
        {"seconds": [0.0] * 8},
        {"seconds": None},
        {"bends": None},
        {"bends": [0.0]},
        {"bends": [9.0] * 70},
        {"bends": ["1"] * 70},
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
