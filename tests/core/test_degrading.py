"""Degrading in steps under a scripted load, on a virtual clock."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from quire.bench.simulated_server import Arrival, SimulatedServer
from quire.core.degrading import Degrading
from quire.core.scheduler_config import SchedulerConfig
from quire.objectives import SLO, ServiceClass, ServiceTerms, parse_degrade
from quire.types import Request, SamplingParams, TokenIds

CLASSES = [ServiceClass("chat", SLO(ttft=500)), ServiceClass("batch")]
STEPS = parse_degrade(["speculation=1", "max_tokens=8", "shed"])


def ask(service_class: int = 0, **fields: object) -> Request:
    params = SamplingParams(max_tokens=40)
    terms = ServiceTerms(service_class=service_class)
    request = Request(request_id="", prompt_token_ids=TokenIds([1]), params=params, terms=terms)
    return replace(request, **fields)  # type: ignore[arg-type]


def test_steps_are_entered_and_left_one_by_one_with_hysteresis() -> None:
    degrading, levels = Degrading(STEPS, CLASSES, 1.0), []
    # seconds -> pressure: high, between, low
    for tenth in range(400):
        now = tenth / 10
        degrading.observe(now, 1.5 if now < 2.5 else 0.7 if now < 20 else 0.1)
        levels.append(degrading.level)
    assert levels[9] == 0
    assert (levels[10], levels[20], levels[199]) == (1, 2, 2)  # between high and low nothing changes
    assert (levels[249], levels[250], levels[299], levels[300], levels[399]) == (2, 1, 1, 0, 0)
    assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(levels))


def test_a_load_that_swings_around_the_threshold_does_not_flap() -> None:
    degrading, changes, before = Degrading(STEPS, CLASSES, 1.0), 0, 0
    for tenth in range(1200):
        degrading.observe(tenth / 10, random.Random(tenth).uniform(0.3, 1.7))
        changes += degrading.level != before
        before = degrading.level
    assert changes == 0


def test_what_waits_is_measured_by_the_level_of_its_class() -> None:
    degrading = Degrading(STEPS, CLASSES, 1.0)
    for tenth in range(30):
        degrading.look(tenth / 10, [ask(1, arrival=-100.0), ask(0, arrival=tenth / 10 - 0.2)])
    assert degrading.level == 0  # batch may wait for any time
    for tenth in range(30, 60):
        degrading.look(tenth / 10, [ask(0, arrival=tenth / 10 - 0.6)])
    assert degrading.level > 0
    plain = Degrading(STEPS, [], 1.0)
    for tenth in range(30):
        plain.look(tenth / 10, [ask(0, arrival=tenth / 10 - 1.2)])
    assert plain.level in {1, 2}
    refusing = Degrading(STEPS, CLASSES, 1.0)
    for tenth in range(30):
        refusing.refused(tenth / 10)
        refusing.look(tenth / 10, [])
    assert refusing.level > 0


def test_other_classes_count_from_then_on() -> None:
    """As live control changes them: what waits has their levels, and the last of them is shed."""
    degrading = Degrading(STEPS, [], 1.0)
    degrading.use(CLASSES)
    for tenth in range(60):
        degrading.look(tenth / 10, [ask(1, arrival=-100.0), ask(0, arrival=tenth / 10 - 0.6)])
    assert degrading.level == 3
    assert (degrading.sheds(ask(1)), degrading.sheds(ask(0))) == (True, False)
    degrading.use([])
    assert degrading.level == 3
    assert (degrading.sheds(ask(1)), degrading.sheds(ask(priority=1))) == (False, True)


def test_each_step_changes_what_it_names() -> None:
    degrading = Degrading(STEPS, CLASSES, 1.0)
    assert not degrading.sheds(ask(1))
    assert degrading.degraded(ask()) == ask()
    degrading.level = 3
    assert (degrading.sheds(ask(1)), degrading.sheds(ask(0))) == (True, False)
    assert degrading.degraded(ask()).params.max_tokens == 8
    assert degrading.degraded(ask(params=SamplingParams(max_tokens=4))).params.max_tokens == 4
    longer = SamplingParams(max_tokens=40, min_tokens=20)
    assert degrading.degraded(ask(params=longer)).params.max_tokens == 20
    assert degrading.counts == {"speculation=1": 3, "max_tokens=8": 2, "shed": 1}
    alone = Degrading(parse_degrade(["shed"]), [], 1.0)
    alone.level = 1
    assert (alone.sheds(ask(priority=1)), alone.sheds(ask()), alone.sheds(ask(priority=-1))) == (
        True,
        False,
        False,
    )


def test_under_a_burst_every_step_is_entered_and_left_again() -> None:
    rng, made, at = random.Random(0), [], 0.0
    while at < 90:
        at += rng.expovariate(30.0 if 10 < at < 25 else 1.0)
        made.append(Arrival(at, rng.choices(range(999), k=100), 40, service_class=rng.randrange(2)))
    degrading, seen = Degrading(STEPS, CLASSES, 1.0), []
    config = SchedulerConfig(num_blocks=2000, max_num_seqs=16, max_num_batched_tokens=256)
    costs = (0.012, 4e-4, 3e-4, 2e-7, 4e-9, 0.0, 0.0, 0.0)
    server = SimulatedServer(config, costs, CLASSES, degrading=degrading)
    run = server.run(made, lambda s: seen.append((s.now, degrading.level)))
    levels = [level for _, level in seen]
    assert set(levels) == {0, 1, 2, 3}
    assert min(now for now, level in seen if level) > 10
    assert levels[-1] == 0
    changes = sum(a != b for a, b in itertools.pairwise(levels))
    assert changes < 24
    shed = [made[record.index].service_class for record in run.records if record.error == "shed"]
    assert shed
    assert set(shed) == {1}
    assert any(record.output_tokens == 8 for record in run.records)
    late = [record.output_tokens for record in run.records if record.scheduled > 80]
    assert set(late) == {40}


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["rest"], "'rest' is not one of shed"), (["shed", "shed"], "shed is given twice"),
        (["shed=2"], "takes no value"), (["model"], "needs a value"), (["max_tokens=0"], "from 1 on"),
        (["speculation=x"], "from 0 on"),
    ],
)  # fmt: skip
def test_wrong_steps_are_refused_by_name(texts: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=f"degrade: .*{why}"):
        parse_degrade(texts)
