"""Forecast, admission and controller, on the real scheduler and a virtual clock."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from quire.bench.goodput import Goodput, goodput
from quire.bench.simulated_server import Arrival, SimulatedRun, SimulatedServer
from quire.bench.statistics import percentile
from quire.bench.timeline import request_metrics
from quire.core.admission_rules import Caution, check_wishes
from quire.core.forecast import Demand, Forecast, Live, outlook
from quire.core.guarantees import StepRoom, worst_end
from quire.core.scheduler_config import SchedulerConfig
from quire.objectives import SLO, ServiceClass, class_of, parse_classes

COSTS = (0.012, 4e-4, 3e-4, 2e-7, 4e-9, 0.0, 0.0, 0.0)
CHAT = ServiceClass("chat", SLO(ttft=500, tpot=50))


def config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {"num_blocks": 4000, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    return SchedulerConfig(max_model_len=8192, **(values | changes))


def poisson(rate: float, count: int, seed: int = 0, service_class: int = 0) -> list[Arrival]:
    rng, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        prompt = [rng.randrange(5000) for _ in range(int(rng.lognormvariate(5.3, 0.8)) + 1)]
        made.append(Arrival(at, prompt, int(rng.lognormvariate(3.2, 0.6)) + 1, service_class))
    return made


def good(served: SimulatedRun, slo: SLO, only: range | None = None) -> Goodput:
    records = served.records if only is None else [served.records[i] for i in only]
    metrics = [None if one.failed else request_metrics(one) for one in records]
    return goodput(metrics, slo, records[-1].scheduled - records[0].scheduled)


@pytest.mark.parametrize("turns", [False, True])
def test_ttft_of_a_burst_is_predicted_before_it_runs(turns: bool) -> None:
    """Nothing comes after it, and lengths are known: the rest is the play against the scheduler, and costs that are
    learned from noise. In a pipeline sequences take turns, and each has a token in every other step."""
    rng = random.Random(1)
    stages: dict[str, Any] = {"steps_in_flight": 2, "takes_turns": True} if turns else {}
    learn = poisson(3.0, 150)
    quiet = learn[-1].at + 60
    prompts = [[rng.randrange(5000) for _ in range(rng.randint(20, 900))] for _ in range(60)]
    burst = [Arrival(quiet, prompt, rng.randint(5, 80)) for prompt in prompts]
    server = SimulatedServer(config(**stages), COSTS, [ServiceClass("any")], admits=True, noise=0.02)
    served = server.run([*learn, *burst])
    assert not served.refused
    errors = []
    for index in range(len(learn), len(learn) + len(burst)):
        record = served.records[index]
        errors.append(abs(served.predicted[index] / (record.times[0] - record.scheduled) - 1))
    errors.sort()
    assert errors[int(0.9 * len(errors))] < 0.12
    assert served.cost_error < 0.05


def test_the_controller_and_admission_hold_goodput_where_arrival_order_collapses() -> None:
    found = {}
    for rate in (5.0, 10.0, 20.0):
        arrivals = poisson(rate, 200)
        plain = SimulatedServer(config(), COSTS, [CHAT]).run(arrivals)
        held = SimulatedServer(config(policy="edf"), COSTS, [CHAT], admits=True, controls=True).run(arrivals)
        found[rate] = good(plain, CHAT.slo).rate, good(held, CHAT.slo).rate
        assert not any(record.failed for record in plain.records)
        assert all(record.failed == (record.index in held.refused) for record in held.records)
    assert found[5.0][1] > 0.95 * found[5.0][0]
    assert found[10.0][1] > 1.3 * found[10.0][0]
    assert found[20.0][1] > 0.9 * max(rate for _, rate in found.values())


def test_the_controller_keeps_a_tpot_that_whole_steps_would_break() -> None:
    arrivals = poisson(6.0, 200)
    slow = SLO(tpot=45)
    plain = SimulatedServer(config(), COSTS, [ServiceClass("x", slow)]).run(arrivals)
    held = SimulatedServer(config(), COSTS, [ServiceClass("x", slow)], controls=True).run(arrivals)
    assert good(held, slow).share > 0.93
    assert good(held, slow).share > good(plain, slow).share + 0.02


def test_the_controller_keeps_an_itl_that_whole_steps_would_break() -> None:
    """A level of nearly every gap: a TPOT of the same time, with its credit for long steps, does not keep it."""
    arrivals = poisson(4.0, 150)
    bound = SLO(itl=60)
    shares = {}
    for name, level in (("itl", bound), ("tpot", SLO(tpot=60)), ("none", SLO())):
        served = SimulatedServer(config(), COSTS, [ServiceClass("x", level)], controls=True).run(arrivals)
        shares[name] = good(served, bound).share
    assert shares["itl"] > 0.9
    assert max(shares["tpot"], shares["none"]) < 0.5


def test_batch_work_fills_what_is_left_and_yields_within_one_step() -> None:
    classes = parse_classes(["chat:ttft=500ms,tpot=60ms", "batch:"])
    chat = poisson(2.0, 60)
    flood = [Arrival(0.0, list(range(i, i + 300)), 60, 1) for i in range(120)]
    alone = SimulatedServer(config(max_num_seqs=8), COSTS, classes, controls=True).run(chat)
    server = SimulatedServer(config(max_num_seqs=8), COSTS, classes, controls=True)
    waited: dict[str, int] = {}
    began = 0.0  # the latest step

    def look(server: SimulatedServer) -> None:
        nonlocal began
        running = [seq.state.request for seq in server.scheduler.running]
        if any(request.terms.service_class for request in running):
            for seq in server.scheduler._requests.waiting:
                request = seq.state.request
                if not request.terms.service_class and request.arrival <= began:
                    waited[request.request_id] = waited.get(request.request_id, 0) + 1
        began = server.now

    served = server.run([*chat, *flood], look)
    assert max(waited.values(), default=0) <= 1
    assert all(not record.failed and record.finished for record in served.records)
    both = good(served, classes[0].slo, range(len(chat)))
    assert both.share >= good(alone, classes[0].slo).share - 0.06


@pytest.mark.parametrize("rate", [8.0, 16.0])
def test_admitted_deadlines_are_kept_where_a_queue_would_miss_them(rate: float) -> None:
    """At most 1 % of the admitted; and the machine is not idle for that."""
    asked = [replace(one, deadline=1 + 0.04 * one.output) for one in poisson(rate, 300)]
    missed = {}
    for admits in (False, True):
        served = SimulatedServer(config(policy="edf"), COSTS, admits=admits).run(asked)
        there = [record for record in served.records if not record.failed]
        late = sum(
            (one.finished or 0.0) - one.scheduled > (asked[one.index].deadline or 0.0) for one in there
        )
        missed[admits] = late / len(there)
        assert len(there) > 300 * (0.35 if admits else 1) - 1
    assert missed[False] > 0.2
    assert missed[True] <= 0.01


def test_a_flood_of_less_urgent_work_costs_the_urgent_two_steps_at_the_99th_percentile() -> None:
    classes = parse_classes(["urgent:", "flood:"])
    urgent = poisson(1.5, 150)
    flood = [Arrival(0.0, list(range(i, i + 400)), 40, 1) for i in range(400)]
    p99, longest, last = {}, 0.0, 0.0

    def look(server: SimulatedServer) -> None:
        nonlocal longest, last
        longest, last = (
            max(longest, server.now - last if server.scheduler.num_running > 4 else 0.0),
            server.now,
        )

    for name, asked in (("alone", urgent), ("flooded", [*urgent, *flood])):
        served = SimulatedServer(config(max_num_seqs=8), COSTS, classes).run(asked, look)
        first = sorted(one.times[0] - one.scheduled for one in served.records[: len(urgent)])
        p99[name] = percentile(first, 99)
    assert longest < 0.3
    assert p99["flooded"] < p99["alone"] + 2 * longest


def test_predicted_lengths_win_most_of_what_known_ones_do() -> None:
    """Two accounts, one with short answers and one with long ones: the history of each tells them apart."""
    rng, at, asked = random.Random(4), 0.0, []
    for _ in range(400):
        at += rng.expovariate(9.0)
        short = rng.random() < 0.7
        output = rng.randint(5, 15) if short else rng.randint(120, 200)
        prompt = rng.choices(range(5000), k=rng.randint(20, 100))
        asked.append(Arrival(at, prompt, output, account="short" if short else "long"))
    mean, error = {}, 0.0
    for name, policy, known in (("fcfs", "fcfs", True), ("known", "sjf", True), ("predicted", "sjf", False)):
        server = SimulatedServer(config(policy=policy, max_num_seqs=8), COSTS)
        served = server.run([replace(one, known=known, most=256) for one in asked])
        took = [(one.finished or 0.0) - one.scheduled for one in served.records]
        mean[name], error = sum(took) / len(took), served.length_error
    assert mean["known"] < 0.7 * mean["fcfs"]
    assert mean["fcfs"] - mean["predicted"] > 0.8 * (mean["fcfs"] - mean["known"])
    assert 0.02 < error < 0.5


def test_a_wish_that_cannot_be_kept_is_named() -> None:
    late = Forecast(start=2.0, ttft=3.0, tpot=0.1)
    assert check_wishes(late, 11, None) is None
    broken = check_wishes(late, 11, None, start=1.0, finish=60.0)
    assert broken is not None
    assert (broken.what, broken.wait) == ("max_queue_ms", 1.0)
    broken = check_wishes(late, 11, ServiceClass("chat", SLO(ttft=2900)), elapsed=0.5)
    assert broken is not None
    assert str(broken) == "ttft of class chat of 2900 ms cannot be kept: 3500 ms predicted"
    broken = check_wishes(late, 11, None, finish=3.5)
    assert broken is not None
    assert (broken.what, round(broken.predicted, 6)) == ("deadline_ms", 4.0)
    never = check_wishes(Forecast(float("inf"), float("inf"), float("inf")), 5, None, finish=1.0)
    assert never is not None
    assert never.wait == 600.0


def test_caution_grows_with_late_answers_and_shrinks_again() -> None:
    caution = Caution()
    for _ in range(5):
        caution.answered(late=True)
    assert caution.factor > 1.4
    for _ in range(5000):
        caution.answered(late=False)
    assert caution.factor == 1.0


def test_a_play_that_lasts_too_long_says_never() -> None:
    queue = [Live((0.0,), False, Demand(500, 0, 50.0))] * 100
    new = Live((1.0,), False, Demand(10, 0, 5))
    limits: dict[str, Any] = {"budget": 512, "slots": 4, "tokens": 10_000}
    assert outlook(COSTS, queue, new, **limits).ttft > 10
    assert outlook(COSTS, queue, new, **limits, most=3.0).ttft == float("inf")
    with pytest.raises(ValueError, match="8 are expected"):
        outlook(COSTS[:3], [], new, **limits)


def test_only_what_ranks_ahead_is_waited_for() -> None:
    lives = [Live((0.0, float(i), 0.0), False, Demand(500, 0, 50.0)) for i in range(20)]
    limits: dict[str, Any] = {"budget": 512, "slots": 2, "tokens": 10_000}
    first = outlook(COSTS, lives, Live((0.0, -1.0, 0.0), False, Demand(50, 0, 5.0)), **limits)
    last = outlook(COSTS, lives, Live((0.0, 99.0, 0.0), False, Demand(50, 0, 5.0)), **limits)
    assert first.ttft < 0.1
    assert last.ttft > 5
    assert first.start == 0.0
    assert last.start < last.ttft


def test_streams_that_take_turns_have_a_token_in_every_other_step() -> None:
    limits: dict[str, Any] = {"budget": 512, "slots": 8, "tokens": 10_000}
    others = [Live((float(at),), True, Demand(0, 100, 500.0)) for at in range(3)]
    new = Live((9.0,), False, Demand(200, 0, 30.0))
    found, plain = (
        outlook(COSTS, others, new, to_end=True, turns=turns, pace=0.0, **limits) for turns in (True, False)
    )
    # Chunks of 64 in four steps, each beside two of the three streams.
    assert found.ttft == pytest.approx(4 * (COSTS[0] + 2 * COSTS[1]) + 200 * COSTS[2], rel=0.02)
    assert found.tpot == pytest.approx(2 * (COSTS[0] + 2 * COSTS[1]), rel=0.02)
    assert found.end == pytest.approx(found.ttft + 29 * found.tpot, rel=0.02)
    assert plain.ttft == pytest.approx(COSTS[0] + 3 * COSTS[1] + 200 * COSTS[2], rel=0.02)
    # Alone nothing runs beside it.
    alone = [outlook(COSTS, [], new, turns=turns, **limits).tpot for turns in (True, False)]
    assert alone[0] == alone[1]
    worst = worst_end(COSTS, new, others, StepRoom(512, 8, 10_000, turns=True))
    assert worst >= found.end > worst_end(COSTS, new, others, StepRoom(512, 8, 10_000))


def test_a_request_waits_for_the_step_that_runs() -> None:
    """Of one stream, each step of which takes 12.4 ms; a step with the new prompt takes 3 ms more."""
    limits: dict[str, Any] = {"budget": 512, "slots": 8, "tokens": 10_000}
    running, new = [Live((0.0,), True, Demand(0, 0, 50.0))], Live((1.0,), False, Demand(10, 0, 5.0))

    def ttft(elapsed: float | None, *waiting: Live) -> float:
        return round(outlook(COSTS, [*running, *waiting], new, elapsed=elapsed, **limits).ttft, 4)

    assert ttft(None) == 0.0154
    assert [ttft(elapsed) for elapsed in (0.0, 0.01, 0.0124)] == [0.0278, 0.0178, 0.0154]
    assert ttft(0.0150) == 0.0252  # the next one runs already
    # What came before the step runs in it, what came later runs in the next one with the new request.
    aboard, late = (Live((2.0,), False, Demand(100, 0, 5.0), late) for late in (False, True))
    assert ttft(0.0, aboard) == pytest.approx(0.0278 + 0.030 + 0.0004, abs=1e-3)
    assert ttft(0.0, late) == 0.0278


def test_an_answer_is_played_to_its_end_with_the_prompts_behind_it() -> None:
    limits: dict[str, Any] = {"budget": 512, "slots": 8, "tokens": 10_000}
    new = Live((1.0,), False, Demand(10, 0, 20.0))
    behind = [Live((2.0,), False, Demand(500, 0, 5.0)) for _ in range(3)]
    alone = outlook(COSTS, [], new, to_end=True, **limits)
    assert alone.end == pytest.approx(alone.ttft + 19 * 0.0124, rel=0.01)
    delayed = outlook(COSTS, behind, new, to_end=True, **limits)
    assert delayed.ttft == alone.ttft
    assert delayed.end > alone.end + 3 * 500 * COSTS[2]
    assert delayed.finish(20) == delayed.end
    assert outlook(COSTS, behind, new, **limits).finish(20) < alone.end * 1.05


def test_classes_of_service() -> None:
    classes = parse_classes(["interactive:ttft=0.5s,tpot=50ms", "work:e2el=60000,guaranteed", "batch:"])
    assert classes[0].slo == SLO(ttft=500, tpot=50)
    assert classes[1].guaranteed
    assert not classes[2].slo.bounds
    tiers = {None: 0, "auto": 0, "default": 0, "priority": 0, "flex": 2, "batch": 2, "work": 1, "gold": None}
    assert {tier: class_of(tier, classes) for tier in tiers} == tiers
    assert class_of("default", parse_classes(["a:", "default:"])) == 1


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["x"], "does not have the form"),
        (["a b:"], "does not have the form"),
        (["a:", "a:"], "a is given twice"),
        (["a:ttft=x"], "slo: a: 'ttft=x': 'x' is not a number of milliseconds"),
        (["a:ttft=5m"], "'5m' is not a number of milliseconds"),
        (["a:speed=3"], "a: 'speed=3' does not have the form"),
        (["a:ttft=0"], "a: ttft: 0.0 is not a positive number"),
        ([f"c{i}:" for i in range(9)], "9 classes are over the limit of 8"),
    ],
)
def test_what_is_no_class_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_classes(texts)
