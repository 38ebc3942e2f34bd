"""A recorded load under other settings; and how well steps are fitted."""

from __future__ import annotations

import json
import math
import os
import random
from array import array
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.checkpoints import TinyModel
from helpers.tokenizers import save_whole
from quire.bench.fitted_steps import StepFit, StepsOfKind, TimedStep, fit_steps, fit_timed, timed_steps
from quire.bench.machine_pace import MachinePace
from quire.bench.recorded_drafts import DraftWalk, RecordedDrafts
from quire.bench.request_metrics import summarize
from quire.bench.scenario import parse_settings
from quire.bench.shared_cpus import CpuUse, cpu_use
from quire.bench.simulated_arrivals import RecordedLoad, handover_of, load_of_log
from quire.bench.step_weights import fitted_weights
from quire.bench.tuning import tune
from quire.bench.what_if import FigureIf, WhatIf, what_if
from quire.cli.main import main
from quire.cli.whatif import seconds_of
from quire.config.schema import EngineConfig
from quire.core.cost_model import StepCostModel
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.build.assemble import build
from quire.engine.build.log_file import make_recorder
from quire.engine.build.opening import open_model
from quire.objectives import parse_slo
from quire.steplog import log_rows as rows
from quire.steplog.log_files import Log, LogFile, read_log, read_rows
from steplog.storm import engine, request, storm


def recorded(path: Path, count: int = 60, *, first: int = 0, step_ms: float = 1.0, **options: Any) -> Log:
    """A log of requests that come one after the other, five milliseconds apart."""
    core, worker, clock = engine(3, file=LogFile(path, 2**26), **{"num_blocks": 400, **options})
    worker.step_ms, due, made = step_ms, clock.now, first
    count += first
    while made < count or core.has_work():
        while made < count and (clock.now >= due or not core.has_work()):
            clock.now = max(clock.now, due)
            prompt = [1 + (made * 7 + i) % 39 for i in range(4 + made % 23)]
            request(
                core, f"r{made}", prompt, clock, max_tokens=3 + made % 9, ignore_eos=True, arrival=due / 1e9
            )
            made, due = made + 1, due + 5_000_000
        if core.has_work():
            core.step()
    assert core.recorder is not None
    core.recorder.close()
    return read_log(path)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> RecordedLoad:
    return load_of_log(recorded(tmp_path_factory.mktemp("log") / "a.qlog"))


def figures(found: WhatIf) -> dict[str, FigureIf]:
    return {one.name: one for one in found.figures}


def test_fifty_steps_are_enough_to_fit(tmp_path: Path) -> None:
    log = recorded(tmp_path / "a.qlog", 150)
    steps = [i for i, row in enumerate(log.rows) if isinstance(row, rows.Step)]
    fit = fit_steps(log.rows[: steps[50]], StepCostModel().weights)
    assert fit.steps == 50
    later = list(timed_steps(log.rows[steps[50] :]))[:-1]
    errors = sorted(abs(fit.seconds(features) / seconds - 1) for _, features, seconds in later)
    assert errors[len(errors) // 2] < 0.07
    assert fit.outside(tuple(2 * most for most in fit.most))
    assert not fit.outside(fit.most)


def test_the_simulation_is_near_what_was_measured(load: RecordedLoad) -> None:
    found = what_if(load, {"max_num_seqs": "5"}, parse_slo(("ttft:20",)))
    for name, one in figures(found).items():
        assert one.error is not None
        assert one.error < 0.1, name
        assert one.now.value == one.then.value, "the settings are those of the log"
        assert one.then.low <= one.then.value <= one.then.high


def test_a_simulated_load_meets_the_machine_of_the_same_second() -> None:
    """Steps are slow after the fifth second; and short steps do not come twice where a long one ran."""
    decode, prompt = (1.0, 1.0, *[0.0] * 6), (1.0, 0.0, 8.0, *[0.0] * 5)
    begun, paces = [i / 10 for i in range(100)], [1.0] * 50 + [3.0] * 50
    ratios = [(0.5, 1.5)[i % 2] for i in range(100)]
    kinds = {
        (1, 0): StepsOfKind(1.0, begun, ratios, paces),
        (0, 4): StepsOfKind(1.0, [0.0, 9.0], [1.0, 2.0], [1.0, 3.5]),
    }
    fit = StepFit((1.0,) * 8, kinds, MachinePace([0.0, 5.0], [1.0, 3.0]), (1.0,) * 8, 102, 0.5, 0.0)
    draw = fit.walk(0)
    assert [draw(decode, now) for now in (0.0, 0.01, 0.02)] == [0.5, 1.5, 0.5]
    assert {draw(decode, now) for now in (7.0, 7.1)} == {1.5, 4.5}
    assert draw(prompt, 0.1) == 1.0
    assert draw(prompt, 8.9) == 7.0
    late = fit.walk(0)
    assert [late(prompt, 6.0) for _ in range(3)] == [3.0, 6.0, 3.0], (
        "none of the kind ran then: others, at this pace"
    )
    assert draw((1.0, 9.0, *[0.0] * 6), 7.0) in {1.5, 4.5}, "the nearest kind stands for one that did not run"
    early = [fit.walk(seed)(decode, 0.0) for seed in range(40)]
    assert {0.5, 1.5, 4.5} == set(early), "other seeds have the machine of other seconds"


def test_what_a_slow_moment_did_to_many_rows_is_not_a_price_of_rows() -> None:
    """Steps of eight rows ran while the machine was six times as slow, and at no other time."""
    rng = random.Random(5)
    features, seconds, begun, at = [], [], [], 0.0
    for i in range(4000):
        slow, many = 1500 <= i < 2000, 1500 <= i < 2000 and i % 2
        count = 8 if many else 1 + i % 3
        features.append((1.0, float(count), 0.0, 50.0 * count, *[0.0] * 4))
        seconds.append((0.002 + 0.0002 * count) * (6 if slow else 1) * rng.uniform(0.95, 1.05))
        begun.append(at)
        at += seconds[-1]
    fit = fit_timed(list(zip(begun, features, seconds, strict=True)), (0.01, 0.001, *[0.0] * 6))
    assert fit.seconds((1.0, 8.0, 0.0, 400.0, *[0.0] * 4)) == pytest.approx(0.0036, rel=0.1)
    assert fit.pace.at(begun[1750]) == pytest.approx(6, rel=0.1)
    assert fit.levels[1] > 3
    draw = fit.walk(0)
    factors = sorted(draw((1.0, 8.0, 0.0, 400.0, *[0.0] * 4), begun[100]) for _ in range(50))
    assert factors[25] == pytest.approx(1, rel=0.1), "in a fast moment they are fast"


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_prompts_have_the_pace_of_other_steps_as_far_as_the_log_shows(share: float) -> None:
    """Half a second fast, half a second slow; prompts take the pace of the machine to the power of `share`."""
    rng = random.Random(6)
    timed, at = list[TimedStep](), 0.0
    while at < 60:
        pace = random.Random(int(2 * at)).choice((0.6, 1.0, 1.0, 1.0, 2.0))
        prompt = len(timed) % 5 == 0
        features = (1.0, 0.0, 300.0) if prompt else (1.0, 1.0 + rng.randrange(2), 0.0)
        taken = 0.02 * pace**share if prompt else 0.004 * pace
        timed.append((at, (*features, *[0.0] * 5), taken * rng.uniform(0.95, 1.05)))
        at += taken
    fit = fit_timed(timed, (0.01, *[0.0] * 7))
    assert fit.shares == pytest.approx((1.0, share), abs=0.15)
    assert fit_timed(timed[:8], (0.01, *[0.0] * 7)).shares == (1.0, 1.0), "nothing shows that they differ"


def test_error_bars_hold_the_pace_of_all_parts_of_the_log(load: RecordedLoad) -> None:
    narrow = figures(what_if(load, {}))["tpot_mean"].then
    fit = replace(load.fit, levels=(0.5, 2.0))
    wide = figures(what_if(replace(load, fit=fit), {}))["tpot_mean"].then
    assert wide.value == narrow.value
    assert wide.low < 0.6 * wide.value
    assert wide.high > 1.8 * wide.value


def test_kinds_of_steps_that_were_not_seen_take_what_the_nearest_do() -> None:
    """Steps of prompts up to 511 tokens take three times what the sum says, and a few short ones ten times."""

    def row(rows: int, tokens: int) -> tuple[float, ...]:
        return 1.0, float(rows), float(tokens), 0.0, *[0.0] * 4

    timed = [(i / 10, row(i % 3, 511 - i % 200), 3.0 + 0.01 * (i % 7)) for i in range(90)]
    timed += [(9.0 + i / 10, row(0, 2), 0.5) for i in range(3)]
    timed.sort()
    fit = fit_timed(timed, (0.01, *[0.0] * 7))
    seen, beyond, few = row(1, 511), row(1, 1023), row(0, 2)

    def factor(features: tuple[float, ...]) -> float:
        return fit.seconds(features) / sum(w * x for w, x in zip(fit.weights, (*features, 1.0), strict=True))

    assert factor(beyond) == pytest.approx(factor(seen))
    assert fit.seconds(few) == pytest.approx(0.5, rel=0.5)


def test_a_search_says_what_the_log_cannot_tell(load: RecordedLoad) -> None:
    """Of a fit whose larger steps are told by its smaller ones, twice as large ones are known."""
    assert max(load.fit.reach_errors) < 0.1
    assert load.fit.reach()[1] == 2 * load.fit.most[1]
    blind = replace(load, fit=replace(load.fit, reach_errors=(math.inf, math.inf)))
    assert blind.fit.reach()[1] == pytest.approx(1.1 * load.fit.most[1])
    slo = parse_slo(("ttft:5",))
    known, unknown = (tune(one, slo, 12, rate=4) for one in (load, blind))
    told = {one.said(): one.beyond for one in known}
    assert any(one.beyond and not told.get(one.said(), "x") for one in unknown)
    far = next(one.beyond for one in unknown if one.beyond)
    assert "of the steps have over" in far
    assert "the log has up to" in far


def test_prompts_twice_as_long_as_any_are_told_by_what_begins_with_each() -> None:
    """A step with a prompt takes 8 ms before its first token: a price of tokens alone would be too high."""
    rng = random.Random(2)
    timed, at = [], 0.0
    for i in range(600):
        tokens = rng.randrange(60, 512) if i % 3 == 0 else 0
        features = (1.0, 2.0, float(tokens), 300.0, tokens * tokens / 2.0, 0.0, 0.0, 0.0)
        taken = (0.003 + (0.008 + 16e-5 * tokens if tokens else 0)) * rng.uniform(0.97, 1.03)
        timed.append((at, features, taken))
        at += taken
    fit = fit_timed(timed, (0.01, 1e-3, 5e-4, 0.0, 1e-8, 0.0, 0.0, 0.0))
    assert fit.reach_errors[1] < 0.1
    assert fit.reach()[2] > 1000
    features = (1.0, 2.0, 1024.0, 300.0, 2.0**19, 0.0, 0.0, 0.0)
    assert fit.seconds(features) == pytest.approx(0.011 + 16e-5 * 1024, rel=0.05)


def test_a_log_tells_of_processors_that_one_process_shares_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have processes of their own; of processors that the engine may not use, the time is in that of others."""

    def told(cores: int, **options: int) -> int:
        monkeypatch.setattr("quire.engine.build.log_file.usable_cores", lambda: cores)
        config = SchedulerConfig(num_blocks=8, block_size=16)
        recorder = make_recorder(config, EngineConfig(**options), StepCostModel(), "m")
        opened = read_rows(recorder.ring()).rows[0]
        assert isinstance(opened, rows.Opened)
        return opened.cpus

    everything = os.cpu_count() or 1
    assert told(everything) == everything
    assert told(everything + 1) == 0
    assert told(everything, tensor_parallel_size=2) == 0
    assert told(everything, pipeline_parallel_size=2) == 0


def test_replicas_of_one_machine_share_its_processors(load: RecordedLoad) -> None:
    opened = rows.Opened(0, 0.0, {}, (), "", prompts=False, cpus=2)
    names = (
        "number",
        "scheduled",
        "executed",
        "forward",
        "sample",
        "draft",
        "stolen",
        "predicted",
        "blocks",
        "waiting",
    )
    rest: dict[str, Any] = dict.fromkeys(names, 0) | {"limits": (1, 1), "rows": []}
    log: list[rows.AnyRow] = [opened]
    for i in range(41):
        cpu = {"others": 40_000, "own": 50_000} if i % 2 else {}
        log.append(rows.Step(at=i * 10**8, updated=5 * 10**7, **rest, **cpu))
    use = cpu_use(log)
    assert use is not None
    assert (use.cpus, use.engine, use.others) == (2, pytest.approx(0.5), pytest.approx(0.2, rel=0.1))
    assert cpu_use(log[1:]) is None
    assert [CpuUse(2, 1.0, 0.4).slower(count) for count in (1, 2, 4)] == [
        1.0,
        pytest.approx(1.2),
        pytest.approx(2.2),
    ]
    assert CpuUse(8, 1.0, 0.4).slower(4) == 1.0
    busy = replace(load, cpus=CpuUse(2, 2.0, 0.0))
    apart, beside = (
        figures(what_if(busy, {name: "2", "rate": "3"})) for name in ("replicas", "data_parallel_size")
    )
    idle = figures(what_if(replace(load, cpus=CpuUse(8, 1.0, 0.0)), {"data_parallel_size": "2", "rate": "3"}))
    assert beside["tpot_mean"].then.value > 1.2 * apart["tpot_mean"].then.value
    assert idle["tpot_mean"].then.value == apart["tpot_mean"].then.value
    assert idle["tpot_mean"].then.high > 1.2 * idle["tpot_mean"].then.value, "at worst they are one"
    with pytest.raises(ValueError, match="data_parallel_size"):
        what_if(replace(load, cpus=None), {"data_parallel_size": "2"})


def test_settings_change_what_they_should(load: RecordedLoad) -> None:
    plain = figures(what_if(load, {"rate": "1"}))
    for settings, name, sign in (
        ({"max_num_seqs": "1"}, "ttft_mean", 1),
        ({"rate": "3"}, "ttft_mean", 1),
        ({"replicas": "2", "rate": "3"}, "output_token_rate", 1),
        ({"enable_prefix_caching": "off", "rate": "2"}, "ttft_mean", 1),
        ({"max_num_batched_tokens": "6"}, "ttft_mean", 1),
    ):
        change = figures(what_if(load, settings))[name].then.value - plain[name].now.value
        assert change * sign > 0, settings
    crowded = what_if(load, {"rate": "9", "max_num_seqs": "20"})
    assert crowded.outside > 0.1, "steps with more rows than were seen"


@pytest.mark.parametrize(
    "change",
    [{"step_ms": 2.0}, {"max_draft_tokens": 6}, {"num_blocks": 16}],
    ids=["slower", "drafts", "blocks"],
)
def test_the_log_of_another_server_says_what_its_settings_cost(
    tmp_path: Path, load: RecordedLoad, change: dict[str, Any]
) -> None:
    """What is predicted from other requests on such a server is then done."""
    like = load_of_log(recorded(tmp_path / "b.qlog", 30, first=100, **change))
    assert (like.drafts is not None) == ("max_draft_tokens" in change)
    real = summarize(load_of_log(recorded(tmp_path / "c.qlog", **change)).records).metrics()
    found = figures(what_if(load, {}, like=like))
    changes = []
    for name in ("ttft_mean", "tpot_mean", "e2el_mean", "output_token_rate"):
        assert found[name].then.value == pytest.approx(real[name].value, rel=0.1), name
        changes.append(abs(found[name].then.value / found[name].now.value - 1))
    assert max(changes) > 0.1, "negative control: it is not what the server of the load would do"


def test_what_was_known_may_be_wrong_by_any_factor() -> None:
    """A draft takes 50 µs, and was said to take half a second."""
    rng = random.Random(3)
    features = [(1.0, 1.0 + i % 4, 0.0, 300.0, 0.0, 0.0, 0.0, float(rng.randrange(6))) for i in range(600)]
    seconds = [(0.001 + 1e-4 * row[1] + 5e-5 * row[7]) * rng.uniform(0.95, 1.05) for row in features]
    before = np.array([0.01, 1e-3, 5e-4, 0.0, 1e-8, 0.5, 0.1, 0.5])
    weights = fitted_weights(np.array(features), np.array(seconds), before)
    assert weights[7] == pytest.approx(5e-5, rel=0.2)


_CHAIN = rows.TokenChain((0, -1), 0, b"")


def arriving(number: int, arrival: float, at: float) -> rows.Arrived:
    return rows.Arrived(
        at=round(at * 1e9), number=number, request_id=f"r{number}", arrival=arrival, prompt_tokens=4,
        chain=_CHAIN, params={}, domain=("", "", ""),
    )  # fmt: skip


def bare_step(at: float, seconds: float) -> rows.Step:
    rest = dict.fromkeys(
        ("number", "scheduled", "executed", "forward", "sample", "draft", "stolen", "predicted"), 0
    )
    return rows.Step(
        at=round(at * 1e9), updated=round(seconds * 1e9), blocks=0, waiting=0, limits=(8, 8), rows=[], **rest
    )


def test_requests_on_their_way_are_there_with_the_first() -> None:
    """An engine at rest begins a millisecond after the first one, with those that came up to 0.3 ms before that. One
    with work has what came 2 ms before a step."""
    log: list[rows.AnyRow] = []
    number = 0
    for second in range(40):
        start = 1.0 + second
        came = [start - 1e-3, start - 1e-3 + 2e-5 * (1 + second)]  # the second one up to 0.8 ms later
        waiting = start + 1e-4 * (1 + second)  # and another one while the step of 5 ms runs
        taken = [start, start if start - came[1] > 3e-4 else start + 5e-3]
        taken += [start + 5e-3 if start + 5e-3 - waiting > 2e-3 else start + 1e-2]
        events = sorted(zip(taken, [*came, waiting], range(number, number + 3), strict=True))
        for step in range(3):
            at = start + step * 5e-3
            log += [
                arriving(one, arrival, at - 1e-5) for when, arrival, one in events if abs(when - at) < 1e-6
            ]
            log.append(bare_step(at, 4.9e-3))
        log += [rows.Ended(0, one, 0, "stop", 1, _CHAIN) for one in range(number, number + 3)]
        number += 3
    found = handover_of(log)
    assert found.idle == pytest.approx(1e-3, rel=0.05)
    assert found.joining == pytest.approx(3e-4, rel=0.15)
    assert found.busy == pytest.approx(2e-3, rel=0.15)


def test_drafts_are_drawn_by_whole_samples() -> None:
    """Of two samples one is always guessed right: a sequence has the one or the other."""
    drafts = RecordedDrafts([array("i", [3, 3, 3, 3]), array("i", [2, 0])])
    walk = DraftWalk(drafts, 1)
    seen = set()
    for seq in range(20):
        proposed = walk.proposed(seq)
        right = {walk.ran(seq, walk.proposed(seq)) for _ in range(5)}
        assert right == ({3} if proposed == 3 else {0})
        assert walk.ran(seq, 0) == 0
        seen.add(proposed)
        walk.forget(seq)
    assert seen == {2, 3}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("kv_cache_dtype=int8", "how many blocks such a cache has, .* is in a log of such a server"),
        ("max_num_seqs=x", "'x' is not a number"),
        ("max_num_seqs=0", "max_num_seqs: 0"),
        ("rate=0", "out of range"),
        ("replicas=0", "out of range"),
        ("router=best", "router: 'best'"),
        ("enable_prefix_caching=maybe", "not on or off"),
        ("colour=red", "colour cannot be simulated; known are num_blocks"),
        ("num_blocks", "does not have the form"),
    ],
)
def test_bad_settings_are_named(load: RecordedLoad, setting: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        what_if(load, parse_settings([setting]))


def test_tuning_finds_what_was_set_too_low(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.qlog"
    core, _, clock = engine(
        3, file=LogFile(path, 2**26), num_blocks=400, max_num_seqs=2, max_num_batched_tokens=64
    )
    for i in range(40):
        clock.now += 3_000_000
        request(
            core, f"r{i}", [1 + (i * 7 + j) % 39 for j in range(20)], clock, max_tokens=8, ignore_eos=True
        )
        core.step()
    while core.has_work():
        core.step()
    assert core.recorder is not None
    core.recorder.close()
    tried = tune(load_of_log(read_log(path)), parse_slo(("ttft:4",)), 30)
    best = max(tried, key=lambda one: one.score)
    assert len(tried) <= 30
    assert tried[0].settings["max_num_seqs"] == "2"
    assert tried[0].error is not None
    assert best.score >= tried[0].score
    assert main(["tune", "--log", str(path), "--goodput", "ttft:4", "--simulations", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tried"] <= 8
    assert main(["tune", "--log", str(path), "--goodput", "ttft:4", "--simulations", "8"]) == 0
    assert "8 simulations" in capsys.readouterr().out
    assert main(["tune", "--log", str(path)]) == 2
    assert "says what good is" in capsys.readouterr().err


def test_what_tuning_finds_is_measured_on_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log of a server with one place: another policy is better in the simulation, and is then tried on a model."""
    model = save_whole(TinyModel("checked", "LlamaConfig", {}), tmp_path / "model")
    options = {"max_num_seqs": 1, "num_kv_blocks": 64, "max_model_len": 80, "max_num_batched_tokens": 64}
    built = build(open_model(model, tokenizer=False), EngineConfig(threads=1, **options))
    built.close()
    limits = built.core.scheduler.config
    recorded(
        tmp_path / "a.qlog",
        40,
        step_ms=3.0,
        **{one.name: getattr(limits, one.name) for one in fields(limits)},
    )
    command = ["tune", "--log", str(tmp_path / "a.qlog"), "--goodput", "ttft:40", "--simulations", "8"]
    command += ["--check", str(model), "--threads", "1"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changes"]
    assert [one["settings"] for one in found["measured"]] == [
        found[name]["settings"] for name in ("first", "best")
    ]
    for one in found["measured"]:
        assert 0 < one["seconds"] < 60
        assert 0 <= one["goodput_share"] <= 1
        assert one["error"] is not None
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "measured on this engine:" in said
    assert ("best here" in said) != ("not better on this engine" in said)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.qlog"
    core, _ = storm(4, 30, file=LogFile(path, 2**24))
    assert core.recorder is not None
    core.recorder.close()
    command = ["whatif", "--log", str(path), "--set", "max_num_seqs=2", "--goodput", "ttft:50"]
    assert main([*command, "--last", "1h", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["set"] == {"max_num_seqs": "2"}
    assert found["figures"]["goodput"]["then"]["low"] <= found["figures"]["goodput"]["then"]["high"]
    assert main(command) == 0
    assert "step times: fitted to" in capsys.readouterr().out
    assert main(["whatif", "--log", str(path), "--like", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"] == found["fit"]
    assert main(["whatif", "--log", str(path), "--like", str(path)]) == 0
    assert "with a server like that of a.qlog" in capsys.readouterr().out
    assert main(["whatif", "--log", str(path)]) == 2
    assert "--set NAME=VALUE or --like FILE is needed" in capsys.readouterr().err
    assert main([*command, "--last", "soon"]) == 2
    assert main(["whatif", "--set", "rate=2", "--url", "http://127.0.0.1:9"]) == 2
    assert main([*command, "--last", "0.000001s"]) == 1
    assert (seconds_of("90s"), seconds_of("1.5h")) == (90, 5400)
