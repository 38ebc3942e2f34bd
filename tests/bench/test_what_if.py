"""A recorded load under other settings; and how well steps are fitted."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from quire.bench.fitted_steps import fit_steps, timed_steps
from quire.bench.recorded_drafts import DraftWalk, RecordedDrafts
from quire.bench.request_metrics import summarize
from quire.bench.scenario import parse_settings
from quire.bench.simulated_arrivals import RecordedLoad, load_of_log
from quire.bench.tuning import tune
from quire.bench.what_if import FigureIf, WhatIf, what_if
from quire.cli.main import main
from quire.cli.whatif import seconds_of
from quire.core.cost_model import StepCostModel
from quire.objectives import parse_slo
from quire.steplog import log_rows as rows
from quire.steplog.log_files import Log, LogFile, read_log
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
    errors = sorted(abs(fit.seconds(features) / seconds - 1) for features, seconds in later)
    assert errors[len(errors) // 2] < 0.07
    assert fit.outside(tuple(2 * most for most in fit.most))
    assert not fit.outside(fit.most)


def test_the_simulation_is_near_what_was_measured(load: RecordedLoad) -> None:
    found = what_if(load, {"max_num_seqs": "5"}, parse_slo(("ttft:20",)))
    for name, one in figures(found).items():
        assert one.error is not None
        assert one.error < 0.1, name
        assert one.now == one.then, "the settings are those of the log"
        assert one.then.low <= one.then.value <= one.then.high


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


def test_drafts_are_drawn_by_whole_samples() -> None:
    """Of two samples one is always guessed right: a sequence has the one or the other."""
    drafts = RecordedDrafts([array("i", [3, 3, 3, 3]), array("i", [2, 0])])
    walk = DraftWalk(drafts, random.Random(1))
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
